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
# The way to share the work, and whether to compile.
CASES = {
    "replicate, compiled": (ParallelConfig(), True),
    "replicate, eager": (ParallelConfig(), False),
    "shard, eager": (ParallelConfig(DataParallel.shard), False),
    "shard, compiled": (ParallelConfig(DataParallel.shard), True),
    "shared update, compiled": (ParallelConfig(exact=False), True),
    "shared update, eager": (ParallelConfig(exact=False), False),
}


def train(world: World, device: torch.device, parallel: ParallelConfig, compile: bool) -> list[str]:
    """Loss and gradient norm of each step and some validation losses, in hexadecimal; a digest of the weights.

    Without parallel.exact, norms differ by rounding: they are left out, and clip nothing. Each GPU has one term of a
    sum, which has one order.
    """
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
    optimizer = OptimizerConfig(lr=6e-4, clip=1.0 if parallel.exact else 0.0)
    trainer = Trainer(model, optimizer, ScheduleConfig(warmup_steps=0), training, SEED, device, world, parallel)
    found = []
    for step in range(STEPS):
        drawn = torch.randint(VOCAB, (2, B, T + 1), generator=torch.Generator().manual_seed(step)).to(device)
        batches = [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in drawn]
        own = batches if world.size == 1 else batches[world.rank :][:1]
        update = trainer.update(step, own)
        if step in (0, STEPS - 2, STEPS - 1):  # before the step is captured, and while its replay may still run
            found.append(trainer.evaluate(batches).hex())
        found += [float(value).hex() for value in (update if parallel.exact else update[:1])]
    weights = torch.cat([p.detach().flatten() for p in trainer.whole_model().parameters()])
    trainer.release()
    return [*found, hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()]


def main(folder: Path) -> None:
    world = World.from_environment()
    device, alone = torch.device("cuda", world.local_rank), World(local_rank=world.local_rank)
    found = {}
    with joined(world, device, timeout_s=300):
        for name, (parallel, compile) in CASES.items():
            found[name] = [train(ranks, device, parallel, compile) for ranks in (alone, world)]
    (folder / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
