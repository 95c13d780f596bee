"""What test_several_ranks.py runs in four processes: the same training on 4, 2 and 1 of them.

RANK=<rank> python -m tests.training.several_ranks <folder> <port>
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention import AttentionConfig, build_attention
from data import Batches
from model.gpt import GPT, GPTConfig
from training.device import Precision, World
from training.optimizer import OptimizerConfig, ScheduleConfig
from training.parallel import ParallelConfig
from training.ranks import joined
from training.step import Trainer, TrainingConfig

CPU = torch.device("cpu")
T, B, MICRO_BATCHES, SEED = 32, 2, 4, 7
TEXT = np.frombuffer(Path(os.__file__).read_bytes(), np.uint8)
MODEL = GPTConfig(n_layers=2, n_heads=2, n_embd=32, dropout=0.1)


def build(world: World, parallel: ParallelConfig, **training: Any) -> Trainer:
    torch.manual_seed(SEED)
    gpt = GPT(MODEL, 256, T, build_attention(AttentionConfig(dropout=0.1)))
    settings = TrainingConfig(
        steps=20, batch_size=B, batch_tokens=B * T * MICRO_BATCHES, precision=Precision.fp32, **training
    )
    # A learning rate at which a difference in the last bit would soon be seen.
    return Trainer(gpt, OptimizerConfig(lr=1e-2), ScheduleConfig(warmup_steps=2), settings, SEED, CPU, world, parallel)


def train(trainer: Trainer, steps: range) -> list[list[str]]:
    """Loss and gradient norm of each step, in hexadecimal."""
    world = trainer.world
    batches = Batches(TEXT, T, B, SEED, world.rank, world.size, trainer.micro_steps)
    done = []
    for step in steps:
        update = trainer.update(step, [batches.batch(step, m) for m in range(trainer.micro_steps)])
        done.append([float(value).hex() for value in update])
    return done


def validate(trainer: Trainer) -> str:
    return trainer.evaluate([Batches(TEXT, T, B, SEED).batch(step) for step in range(50, 55)]).hex()


def work(world: World, folder: Path) -> dict[str, Any]:
    """Everything that is compared between numbers of ranks."""
    found: dict[str, Any] = {}
    for name, parallel in {"exact": ParallelConfig(), "any": ParallelConfig(exact=False)}.items():
        trainer = build(world, parallel)
        found[name] = {"updates": train(trainer, range(8)), "validation": validate(trainer)}
    return found


def main(folder: Path, port: int) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for size in (4, 2, 1):
        if rank < size:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port + size))
            world = World(rank, size, rank)
            with joined(world, CPU, timeout_s=60):
                found = work(world, folder)
            (folder / f"{rank}-of-{size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
