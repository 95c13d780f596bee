"""Train a GPT whose attention implementation is one line of configuration.

python train.py attention=tiled seq_len=1024
python train.py --help
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import cli
from attention import build_attention
from config import Config, ConfigError, as_plain, attention_shape, build_probe
from data import Batches, Prefetcher, PreparedData, eval_batches, prepare, save_tokenizer
from model.gpt import GPT
from model.gpt2_weights import load_gpt2
from sample import stream
from training.attention_memory import limit_cpu_memory
from training.checkpoint import load_checkpoint, newest_valid, read_manifest
from training.device import Precision, World, joined, resolve_device, resolve_precision
from training.loop import Interruption, explained_memory, fit
from training.meters import StepMeter
from training.profile import Profiler
from training.record import Bystander, Record
from training.step import Trainer


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """A job of Hydra's. Ends with status 128 + n where signal n stopped it."""
    job = HydraConfig.get()
    folder = Path(os.path.relpath(job.runtime.output_dir))
    with cli.one_sentence(), cli.held(folder):
        status = train(cli.to_config(cfg), folder, list(job.overrides.task))
    if status:
        sys.exit(status)


def train(config: Config, folder: Path, overrides: list[str]) -> int:
    """Build the parts and fit. Returns 0, or 128 + n where signal n ended the run early. Raises UserError."""
    torch.compiler.reset()  # what an earlier job of a sweep has compiled in this process is not for this one
    world, device = World.from_environment(), resolve_device(config.device)
    training = replace(config.training, precision=resolve_precision(config.training.precision, device))
    B, T = training.batch_size, config.seq_len
    if device.type == "cpu" and training.cpu_memory_gib is not None:
        limit_cpu_memory(training.cpu_memory_gib)

    with joined(world, device):
        data = prepare(config.data, progress=world.rank == 0)
        model = build_model(config, data.vocab_size, device, training.precision)
        trainer = Trainer(model, config.optimizer, config.schedule, training, config.seed, device, world)
        start = go_on(trainer, config, folder, data)
        if start >= training.steps and (folder / "summary.json").exists():
            print(f"{folder} is complete with {start} steps; training.steps={2 * start} would make it go on.")
            return 0

        batches = Batches(data.train.tokens, T, B, config.seed, world.rank, world.size, trainer.micro_steps)
        meter = StepMeter(
            device,
            tokens_per_step=B * T * world.size * trainer.micro_steps,
            flops_per_token_full=model.flops_per_token(T, causal=False),
            flops_per_token_causal=model.flops_per_token(T, causal=True),
            precision=training.precision.value,
            device_count=world.size,
        )
        shape, interruption, record = attention_shape(config, device), Interruption(), Bystander()
        if world.rank == 0:
            save_tokenizer(data.tokenizer, folder)
            record = Record(
                folder,
                config.tracking,
                trainer,
                meter,
                interruption,
                config=as_plain(config),
                overrides=overrides,
                shape=shape,
                identity=data.manifest["identity"],
                start=start,
                again=config.resume is not None,
            )
        profiler = Profiler(
            folder,
            device,
            profile=training.profile and world.rank == 0,
            memory_snapshot=training.memory_snapshot and world.rank == 0,
            start=start,
            steps=training.steps,
            print=record.print,
        )
        with record, explained_memory(trainer), interruption, Prefetcher(batches, device, start) as prefetched:
            record.print(greeting(config, trainer, folder))
            fit(
                trainer,
                prefetched,
                eval_batches(data.val.tokens, T, B, training.eval_batches),
                meter=meter,
                probe=build_probe(config, shape),
                profiler=profiler,
                log=record.log,
                save=record.save,
                interruption=interruption,
                start=start,
            )
            if training.sample_tokens and interruption.number is None:
                with trainer.autocast():
                    text = "".join(stream(model, data.tokenizer, "\n", training.sample_tokens, seed=config.seed))
                record.print(f"\n{text.strip()}\n")
    return 128 + interruption.number if interruption.number else 0


def build_model(config: Config, vocab_size: int, device: torch.device, precision: Precision) -> GPT:
    """The model with its first weights: drawn from the seed, or those of `init_from`."""
    attend, training = build_attention(config.attention), config.training
    torch.manual_seed(config.seed)
    model = GPT(
        config.model,
        vocab_size,
        config.seq_len,
        attend,
        training.recompute,
        training.loss,
        device=device,
        dtype=precision.dtype,
    )
    if config.init_from is not None:
        load_gpt2(model, config.init_from)
    return model


def go_on(trainer: Trainer, config: Config, folder: Path, data: PreparedData) -> int:
    """Where the configuration says `resume`, load the newest valid checkpoint. Returns the updates done."""
    if config.resume is None or not cli.has_checkpoints(folder):
        return 0
    path, rejected = newest_valid(folder / "checkpoints")
    print(*rejected, f"going on from {path}", sep="\n")
    manifest = read_manifest(path)
    if manifest.metadata["data"] != data.manifest["identity"]:
        raise ConfigError(
            f"The text of data={config.data.name} has changed since {path}; start a new run without resume."
        )
    trainer.load(load_checkpoint(path, trainer.device))
    return manifest.step


def greeting(config: Config, trainer: Trainer, folder: Path) -> str:
    """What runs where, with what `auto` chose."""
    precision, auto = trainer.training.precision.value, " (auto)"
    return (
        f"attention={config.attention.name}  model={config.model.name}, {trainer.model.num_parameters():,} parameters  "
        f"device={trainer.device}{auto * (config.device == 'auto')}  "
        f"precision={precision}{auto * (config.training.precision.value == 'auto')}"
    )


if __name__ == "__main__":
    cli.launch(main)
