"""What test_several_gpus.py runs in two processes with a GPU each: the same training on one GPU and on both.

torchrun --nproc-per-node 2 -m tests.gpu.several_gpus <folder>
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from attention import AttentionConfig, build_attention
from model.config import GPTConfig
from model.gpt import GPT
from model.loss import LossKind
from training.config import TrainingConfig
from training.device import Precision, World
from training.optimizer import OptimizerConfig, ScheduleConfig
from training.parallel import DataParallel, ParallelConfig
from training.ranks import joined
from training.step import Trainer

T, B, VOCAB, SEED = 1024, 8, 50_257, 7
STEPS = 12  # on two GPUs, with one micro-batch each, a compiled step is captured at the fourth step
CASES = {
    "replicate, compiled": (DataParallel.replicate, True),
    "replicate, eager": (DataParallel.replicate, False),
    "shard, eager": (DataParallel.shard, False),
    "shard, compiled": (DataParallel.shard, True),
}


def train(world: World, device: torch.device, data: DataParallel, compile: bool) -> list[str]:
    """Loss and gradient norm of each step and some validation losses, in hexadecimal; a digest of the weights."""
    torch.compiler.reset()
    torch.manual_seed(SEED)
    attend = build_attention(AttentionConfig("flash", dropout=0.1))
    model = GPT(
        GPTConfig("gpt2", 2, 12, None, 768, 0.1), VOCAB, T, attend, loss=LossKind.chunked, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip
    training = TrainingConfig(
        steps=STEPS, batch_size=B, batch_tokens=2 * B * T, precision=Precision.bf16, compile=compile
    )
    optimizer, schedule = OptimizerConfig(lr=6e-4), ScheduleConfig(warmup_steps=0)
    trainer = Trainer(model, optimizer, schedule, training, SEED, device, world, ParallelConfig(data))
    found = []
    for step in range(STEPS):
        drawn = torch.randint(VOCAB, (2, B, T + 1), generator=torch.Generator().manual_seed(step)).to(device)
        batches = [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in drawn]
        own = batches if world.size == 1 else batches[world.rank :][:1]
        update = trainer.update(step, own)
        if step in (0, STEPS - 2, STEPS - 1):  # before the step is captured, and while its replay may still run
            found.append(trainer.evaluate(batches).hex())
        found += [float(value).hex() for value in update]
    weights = torch.cat([p.detach().flatten() for p in trainer.whole_model().parameters()])
    trainer.release()
    return [*found, hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()]


def main(folder: Path) -> None:
    world = World.from_environment()
    device, alone = torch.device("cuda", world.local_rank), World(local_rank=world.local_rank)
    found = {}
    with joined(world, device, timeout_s=300):
        for name, (data, compile) in CASES.items():
            found[name] = [train(ranks, device, data, compile) for ranks in (alone, world)]
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
