"""The work of test_several_gpus.py in two processes with a GPU each: the same training on one GPU and on both.

torchrun --nproc-per-node 2 -m tests.gpu.several_gpus <folder> <group>
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from attention import AttentionConfig, build_attention
from data.batches import Batch
from model.gpt import GPT, Computation
from model.loss import LossKind
from model.options import GPTConfig
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.ranks import joined
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.training.device import Precision
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig

B, VOCAB, SEED = 8, 50_257, 7
STEPS = 12  # on two GPUs, with one micro-batch each, a compiled step is captured at the fourth step


@dataclass(frozen=True)
class Case:
    """One way to train.

    T            tokens in a sequence
    micro_steps  of each of two GPUs
    """

    parallel: ParallelConfig
    compile: bool
    T: int = 1024
    micro_steps: int = 1
    optimizer: str = "adamw"


SHARD = ParallelConfig(DataParallel.shard)
CASES = {
    "replicate, compiled": Case(ParallelConfig(), compile=True),
    "replicate, two micro-batches": Case(ParallelConfig(), compile=True, micro_steps=2),
    "replicate, eager": Case(ParallelConfig(), compile=False),
    "shard, eager": Case(SHARD, compile=False),
    "shard, compiled": Case(SHARD, compile=True),
    "replicate, Muon, eager": Case(ParallelConfig(), compile=False, optimizer="muon"),
    "shard, Muon, eager": Case(SHARD, compile=False, optimizer="muon"),
    "shard, Muon, compiled": Case(SHARD, compile=True, optimizer="muon"),
    "replicate, positions that two GPUs do not divide": Case(ParallelConfig(), compile=True, T=1023),
}
GROUPS: dict[str, list[str]] = {}  # tests run them side by side
for case_name in CASES:
    GROUPS.setdefault("eager" if case_name.endswith("eager") else case_name.partition(",")[0], []).append(case_name)


def train(world: World, device: torch.device, case: Case) -> list[str]:
    """Loss and gradient norm of each step and some validation losses, in hexadecimal; a digest of the weights."""
    torch.compiler.reset()
    torch.manual_seed(SEED)
    count, dropout = 2 * case.micro_steps, 0.1
    attend = build_attention(AttentionConfig("flash", dropout=dropout))
    model = GPT(
        GPTConfig("gpt2", 2, 12, None, 768, dropout), VOCAB, case.T, attend,
        Computation(loss=LossKind.chunked, device=device, dtype=torch.bfloat16),
    )  # fmt: skip
    training = TrainingConfig(
        steps=STEPS, batch_size=B, batch_tokens=count * B * case.T, precision=Precision.bf16, compile=case.compile
    )
    optimizer = OptimizerConfig(case.optimizer, lr=6e-4)
    schedule = ScheduleConfig(warmup_steps=0)
    config = Config(SEED, optimizer=optimizer, schedule=schedule, training=training, parallel=case.parallel)
    trainer = build_trainer(config, model, device, world)
    found = []
    for step in range(STEPS):
        drawn = torch.randint(VOCAB, (count, B, case.T + 1), generator=torch.Generator().manual_seed(step)).to(device)
        batches = [Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in drawn]
        update = trainer.update(step, batches[world.rank :: world.size])
        if step in (0, STEPS - 2, STEPS - 1):  # before the step is captured, and while its replay may still run
            found.append(trainer.evaluate(batches).hex())
        found += [float(update[name]).hex() for name in ("train/loss", "optim/grad_norm")]
    weights = torch.cat([p.detach().flatten() for p in trainer.whole_model().parameters()])
    trainer.release()
    return [*found, hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()]


def main(folder: Path, group: str) -> None:
    world = World.from_environment()
    device, alone = torch.device("cuda", world.local_rank), World(local_rank=world.local_rank)
    found = {}
    with joined(world, device, timeout_s=300):
        for name in GROUPS[group]:
            found[name] = [train(ranks, device, CASES[name]) for ranks in (alone, world)]
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
