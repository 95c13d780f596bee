"""Train a GPT whose attention implementation is one line of configuration.

python train.py attention=tiled seq_len=1024
python train.py --help
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Before torch is imported: threads that spin for each other halve the speed of a CPU that has other work too.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from recipe.run import process
from recipe.run.completion import complete

if __name__ == "__main__":
    complete()  # before torch is imported, for which a shell's TAB would have to wait
    process.begin()

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from attention.flash import kernel_code
from attention.formula.describe import describe as describe_formula
from data.chat import end_at_answers
from data.errors import brief
from data.options import Documents
from data.prepare import prepare as prepare_data
from data.tasks import TASKS, TaskData
from data.tasks.task import TaskBatches
from data.tokenizers import load_tokenizer
from data.untrusted import UntrustedError
from model.counting import num_parameters
from model.gpt import GPT
from model.linear import products_by
from model.score import ScoreConfig, describe_score
from recipe import CONF
from recipe.distributed.ranks import from_first_rank, joined
from recipe.distributed.world import World
from recipe.infer.generation.sampling import Sampling
from recipe.infer.generation.text import stream
from recipe.infer.starting import HuggingFace
from recipe.run.build import (
    attention_shape,
    build_model,
    build_run,
    build_trainer,
    check_text,
    cpu_threads,
    find_checkpoint,
    restore,
)
from recipe.run.check import check_ranks_agree
from recipe.run.compose import to_config
from recipe.run.config import Config, as_plain
from recipe.run.launch import launch
from recipe.run.meters import device_name
from recipe.run.peaks import describe_peak, product_precision
from recipe.run.record import recorded_out_of_memory
from recipe.run.resume import check_unused
from recipe.run.run_folder import locked, read_summary
from recipe.run.wording import one_sentence
from recipe.training.device import Precision, computing_with, resolve_device
from recipe.training.interruption import Interruption
from recipe.training.loop import Run, fit
from recipe.training.memory import cpu_memory_limit, oom_guard, too_large_model
from recipe.training.options import TrainingConfig
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
    """Train a run in its folder. Returns 0, or 128 + n where signal n ended it early. Raises UserError."""
    world, device = World.from_environment(config.parallel.context), resolve_device(config.device)
    with joined(world, device, config.parallel.timeout_s):
        check_ranks_agree(config)
        folder = from_first_rank(lambda: folder)
        checkpoint = find_checkpoint(config, folder, world)
        with computing_with(cpu_threads(config, checkpoint)), products_by(config.training.cpu_products):
            run = prepare(config, folder, overrides, checkpoint, world, device)
            if run is None:
                return 0
            with run.record:
                run.record.print(describe_run(config, run.trainer))
                for line in describe_formulas(config, run.trainer, folder):
                    run.record.print(line)
                if config.training.compile:
                    run.record.print("compiling: the first steps and the first evaluation wait for it, some minutes")
                done = fit(run)
                finish(run, done, folder)
            run.trainer.release()
    run.interruption.pass_on()
    ended = done == config.training.steps or run.record.reached is not None
    return 0 if ended else 128 + (run.interruption.number or 0)


def prepare(
    config: Config, folder: Path, overrides: list[str], checkpoint: Path | None, world: World, device: torch.device
) -> Run | None:
    """The run of a configuration, ready to train from a checkpoint; None if it is complete already."""
    torch.compiler.reset()  # drops compiled code of an earlier job of a sweep in this process
    task = TASKS.get(config.data.name)
    data = TaskData(task) if task else prepare_data(config.data, announce_wait=world.rank == 0)
    check_text(config, data)  # before a model of that length is built
    with (
        recorded_out_of_memory(folder, as_plain(config), overrides, device, world),
        oom_guard(too_large_model(config.model, device)),
        cpu_memory_limit(config.training.cpu_memory_gib if device.type == "cpu" else None),
    ):
        trainer = build_trainer(
            config, build_model(config, data.vocab_size, device, world, HuggingFace()), device, world
        )
    start = restore(trainer, config, checkpoint, data)
    if (start >= config.training.steps or reached_target(folder, config)) and (folder / "summary.json").exists():
        if world.rank == 0:
            asked = config.training.steps
            state = (
                f"has {start} steps already, more than {asked}" if start > asked else f"is complete with {start} steps"
            )
            print(f"{folder} {state}; training.steps={2 * start} would continue it.")
        return None
    return build_run(config, folder, overrides, data, trainer, start)


def reached_target(folder: Path, config: Config) -> bool:
    """Whether the run in a folder has ended at the target that it has now."""
    try:
        summary = read_summary(folder)
    except (OSError, UntrustedError):
        return False
    then = summary.get("config", {}).get("training", {}).get("target_loss")
    return summary.get("target") is not None and then == config.training.target_loss


def finish(run: Run, done: int, folder: Path) -> None:
    """Say how a run that was stopped goes on; of a complete one on a text, show what its model generates."""
    trainer, training = run.trainer, run.trainer.training
    if run.record.reached is not None:
        tokens = done * trainer.tokens_per_step
        run.record.print(f"reached training.target_loss={training.target_loss} after step {done}: {tokens:,} tokens")
    elif done < training.steps:
        run.record.print(describe_stop(run.interruption, done, training, folder))
    elif training.sample_tokens and not isinstance(run.batches, TaskBatches):
        model = trainer.whole_model()
        if trainer.world.rank == 0:
            run.record.print(sample(model, trainer, folder))


def sample(model: GPT, trainer: Trainer, folder: Path) -> str:
    """What the model of a complete run generates, or why it does not: an attention may refuse lengths of a text."""
    tokenizer, sampling = load_tokenizer(folder), Sampling(temperature=0.8, top_k=50, seed=trainer.seed)
    end_at_answers(tokenizer, folder)
    try:
        text = "".join(
            stream(model, tokenizer, "\n", trainer.training.sample_tokens, sampling, dtype=trainer.dtype)
        ).strip()
    except Exception as error:
        return f"the run is complete, but has no sample ({brief(error)}); training.sample_tokens=0 asks for none"
    return f"\n{text}\n"


def describe_stop(interruption: Interruption, done: int, training: TrainingConfig, folder: Path) -> str:
    """Which signal ended the run, and how to go on."""
    assert interruption.number is not None
    go_on = f"resume={folder} goes on" if training.checkpoint_every else "training.checkpoint_every=0 saved nothing"
    return f"stopped by {signal.Signals(interruption.number).name} after step {done} of {training.steps}; {go_on}"


def describe_formulas(config: Config, trainer: Trainer, folder: Path) -> list[str]:
    """A line for each formula of the model's scores; with score.show, also the code that kernels run, in the folder."""
    scores = [score for score in dict.fromkeys(trainer.model.scores) if score.formula is not None]
    if config.score.show and trainer.world.rank == 0:
        code = [kernel_code(score) for score in scores]
        (folder / "score_code.py").write_text("\n\n\n".join(code) + "\n", encoding="utf-8")
    return [describe_formula(str(score.formula), score.causal, score.window) for score in scores]


def describe_run(config: Config, trainer: Trainer) -> str:
    """The run in one line: its parts, its device, and what `auto` chose."""
    device, precision, auto = trainer.device, trainer.training.precision.value, " (auto)"
    path = trainer.model.attend.path(attention_shape(config, device), config.seq_len)
    idle = {score.window for score in trainer.model.scores if score.window and score.window >= config.seq_len}
    parts = [
        f"attention={config.attention.name}" + (f" ({path} kernels)" if path else ""),
        *([] if config.score == ScoreConfig() else [f"score={describe_score(config.score)}"]),
        *(f"window={window} hides nothing at seq_len={config.seq_len}" for window in sorted(idle)),
        *([] if config.data.documents is Documents.ignore else [f"documents={config.data.documents.name}"]),
        f"model={config.model.name}: {num_parameters(trainer.model):,} parameters",
        f"{trainer.tokens_per_step:,} tokens per step",
        f"device={device}{auto * (config.device == 'auto')}",
        f"precision={precision}{auto * (config.training.precision is Precision.auto)}",
        *([f"{torch.get_num_threads()} threads"] if device.type == "cpu" else []),
    ]
    if trainer.world.size > 1:
        exact = "" if config.parallel.exact else ", sums in any order"
        ways = [f"{trainer.world.size} ranks", f"parallel.data={config.parallel.data.value}"]
        if trainer.world.context > 1:
            ways.append(f"parallel.context={trainer.world.context}")
        parts.append(", ".join(ways) + exact)
    if device.type == "cuda":
        products = product_precision(precision, trainer.model.attend.config.allow_tf32)
        parts.append(f"MFU of {describe_peak(device_name(device), products)}")
    return "  ".join(parts)


if __name__ == "__main__":
    process.run(lambda: launch(main, HuggingFace()))
