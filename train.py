"""Train a GPT whose attention implementation is one line of configuration.

python train.py attention=tiled seq_len=1024
python train.py --help
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin for each other halve the speed of a CPU that has other work too.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from recipe.cli.completion import complete

if __name__ == "__main__":
    complete()  # before torch is imported, for which a shell's TAB would have to wait
    gc.disable()  # until all is imported: visiting all of it again and again would take a fifth of the time

import hydra
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from data.batches import Batches, Prefetcher, eval_batches, piece_lengths
from data.config import Documents
from data.prepare import prepare
from data.store import PreparedData
from data.tokenizers import save_tokenizer
from model.gpt import GPT
from model.score import ScoreConfig, describe_score
from recipe.build import attention_shape, build_meter, build_model, build_probe, build_profiler
from recipe.cli import CONF
from recipe.cli.check import one_document
from recipe.cli.compose import to_config
from recipe.cli.launch import launch
from recipe.cli.resume import check_unused, has_checkpoints
from recipe.cli.wording import one_sentence
from recipe.config import Config, ConfigError, as_plain
from recipe.device import Precision, resolve_device, resolve_precision
from recipe.distributed.ranks import from_first_rank, joined
from recipe.distributed.world import World
from recipe.generation.sampling import Sampling
from recipe.generation.text import stream
from recipe.profiling.attention_memory import cpu_memory_limit
from recipe.profiling.meters import StepMeter, device_name
from recipe.profiling.peaks import describe_peak
from recipe.run_folder import locked
from recipe.training.checkpoint import newest_valid, read_manifest
from recipe.training.config import TrainingConfig
from recipe.training.loop import Interruption, fit, oom_guard, too_large_model, too_large_step
from recipe.training.record import NullRecord, Record, RunMetadata, recorded_out_of_memory
from recipe.training.step import Trainer


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    """A job of Hydra's. Ends with status 128 + n where signal n stopped it."""
    job, config = HydraConfig.get(), to_config(cfg)
    folder = Path(os.path.relpath(job.runtime.output_dir))
    first = World.from_environment().rank == 0
    with one_sentence(), locked(folder) if first else nullcontext():
        if first:
            check_unused(folder, config)  # another run may have begun since the command line was checked
        given: Any = OmegaConf.to_container(job.overrides.task, resolve=False)
        status = train(config, folder, given)
    if status:
        sys.exit(status)


def train(config: Config, folder: Path, overrides: list[str]) -> int:
    """Build the parts and fit. Returns 0, or 128 + n where signal n ended the run early. Raises UserError."""
    torch.compiler.reset()  # drops what an earlier job of a sweep compiled in this process
    world, device = World.from_environment(), resolve_device(config.device)
    training = replace(config.training, precision=resolve_precision(config.training.precision, device))
    B, T = training.batch_size, config.seq_len
    with joined(world, device, config.parallel.timeout_s):
        folder = from_first_rank(lambda: folder)
        data = prepare(config.data, announce_wait=world.rank == 0)
        memory_gib = training.cpu_memory_gib if device.type == "cpu" else None
        with (
            recorded_out_of_memory(folder, as_plain(config), overrides, device, world),
            oom_guard(too_large_model(config.model, device)),
            cpu_memory_limit(memory_gib),
        ):
            model = build_model(config, data.vocab_size, device)
            trainer = Trainer(
                model, config.optimizer, config.schedule, training, config.seed, device, world, config.parallel
            )
        world = trainer.world
        start = resume(trainer, config, folder, data)
        if start >= training.steps and (folder / "summary.json").exists():
            if world.rank == 0:
                print(f"{folder} is complete with {start} steps; training.steps={2 * start} would continue it.")
            return 0

        documents, val_documents = document_bounds(config, data)
        order = (config.seed, world.data_rank, world.data_size, trainer.micro_steps)
        batches = Batches(data.train.tokens, T, B, *order, documents)
        windows = eval_batches(data.val.tokens, T, B, training.eval_batches, training.eval_span, val_documents)
        pieces = piece_lengths(documents, batches.starts(0), T)
        shape, meter = attention_shape(config, device), build_meter(trainer, pieces)
        interruption = Interruption(config.parallel.timeout_s)
        record = NullRecord(trainer)
        if world.rank == 0:
            save_tokenizer(data.tokenizer, folder)
            origin = RunMetadata(as_plain(config), overrides, data.manifest["identity"], shape)
            record = Record(folder, config.tracking, trainer, meter, origin, start, again=config.resume is not None)
        with record:
            record.print(describe_run(config, trainer, meter))
            with (
                oom_guard(too_large_step(trainer)),
                Prefetcher(batches, device, start) as prefetched,
                cpu_memory_limit(memory_gib),  # Python waits forever for a thread that lacks the memory to start
                interruption,
            ):
                done = fit(
                    trainer,
                    prefetched,
                    windows,
                    meter=meter,
                    probe=build_probe(config, device),
                    profiler=build_profiler(config, folder, device, start, record.print),
                    log=record.log,
                    save=record.save,
                    interruption=interruption,
                    start=start,
                )
            if done < training.steps:
                record.print(describe_stop(interruption, done, training, folder))
            elif training.sample_tokens:
                model = trainer.whole_model()
                if world.rank == 0:
                    record.print(example(model, trainer, data))
        trainer.release()
    interruption.pass_on()
    return 0 if done == training.steps else 128 + (interruption.number or 0)


def document_bounds(config: Config, data: PreparedData) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The starts of the documents in the training and the validation split, if batches are to tell them apart.

    Raises ConfigError where there is only one.
    """
    if config.data.documents is Documents.ignore:
        return None, None
    if len(data.train.documents) < 2:
        raise one_document(config)
    return data.train.documents, data.val.documents


def resume(trainer: Trainer, config: Config, folder: Path, data: PreparedData) -> int:
    """Load the newest valid checkpoint if the configuration says `resume`. Returns the updates done."""
    if config.resume is None or not has_checkpoints(folder):
        return 0
    path, rejected = from_first_rank(lambda: newest_valid(folder / "checkpoints"))
    if trainer.world.rank == 0:
        print(*rejected, f"resuming from {path}", sep="\n")
    manifest = read_manifest(path)
    if manifest.metadata["data"] != data.manifest["identity"]:
        raise ConfigError(
            f"The text of data={config.data.name} has changed since {path}; start a new run without resume."
        )
    check_step_size(trainer, manifest.metadata, path)
    trainer.load(path)
    return manifest.step


def check_step_size(trainer: Trainer, metadata: dict[str, Any], path: Path) -> None:
    """Refuse steps whose size has changed with the number of ranks alone. Raises ConfigError."""
    then, now, training = metadata.get("tokens_per_step"), trainer.tokens_per_step, trainer.training
    unchanged = training.batch_tokens is None and training.batch_size == metadata["config"]["training"]["batch_size"]
    if then is not None and then != now and unchanged:
        smallest = trainer.model.seq_len * trainer.world.data_size  # tokens of one sequence for each rank
        fitting = next((n for n in range(training.batch_size, 0, -1) if then % (n * smallest) == 0), None)
        smaller = "" if fitting == training.batch_size else f" training.batch_size={fitting}"
        keep = f"training.batch_tokens={then}{smaller} to keep it, or " if fitting else ""
        raise ConfigError(
            f"{path} was trained with {then} tokens per step, and {trainer.world.size} ranks of "
            f"training.batch_size={training.batch_size} have {now}; set {keep}"
            f"training.batch_tokens={now} to continue with these."
        )


def example(model: GPT, trainer: Trainer, data: PreparedData) -> str:
    """A text that the model generates."""
    sampling = Sampling(temperature=0.8, top_k=50, seed=trainer.seed)
    pieces = stream(model, data.tokenizer, "\n", trainer.training.sample_tokens, sampling, dtype=trainer.dtype)
    return f"\n{''.join(pieces).strip()}\n"


def describe_stop(interruption: Interruption, done: int, training: TrainingConfig, folder: Path) -> str:
    """Which signal ended the run, and how to go on."""
    assert interruption.number is not None
    go_on = f"resume={folder} goes on" if training.checkpoint_every else "training.checkpoint_every=0 saved nothing"
    return f"stopped by {signal.Signals(interruption.number).name} after step {done} of {training.steps}; {go_on}"


def describe_run(config: Config, trainer: Trainer, meter: StepMeter) -> str:
    """The run in one line: its parts, its device, and what `auto` chose."""
    device, precision, auto = trainer.device, trainer.training.precision.value, " (auto)"
    path = trainer.model.attend.path(attention_shape(config, device), config.seq_len)
    idle = {score.window for score in trainer.model.scores if score.window and score.window >= config.seq_len}
    parts = [
        f"attention={config.attention.name}" + (f" ({path} kernels)" if path else ""),
        *([] if config.score == ScoreConfig() else [f"score={describe_score(config.score)}"]),
        *(f"window={window} hides nothing at seq_len={config.seq_len}" for window in sorted(idle)),
        *([] if config.data.documents is Documents.ignore else [f"documents={config.data.documents.name}"]),
        f"model={config.model.name}: {trainer.model.num_parameters():,} parameters",
        f"{meter.tokens_per_step:,} tokens per step",
        f"device={device}{auto * (config.device == 'auto')}",
        f"precision={precision}{auto * (config.training.precision is Precision.auto)}",
    ]
    if trainer.world.size > 1:
        exact = "" if config.parallel.exact else ", sums in any order"
        ways = [f"{trainer.world.size} ranks", f"parallel.data={config.parallel.data.value}"]
        if trainer.world.context > 1:
            ways.append(f"parallel.context={trainer.world.context}")
        parts.append(", ".join(ways) + exact)
    if device.type == "cuda":
        parts.append(f"MFU of {describe_peak(device_name(device), meter.precision)}")
    return "  ".join(parts)


if __name__ == "__main__":
    gc.freeze()  # else every later run of the collector visits all that has been imported
    gc.enable()
    launch(main)
