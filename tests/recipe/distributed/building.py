"""The work of test_sharding.py in two processes: one rank's part of building a sharded trainer.

python -m tests.recipe.distributed.building cpu|cuda <folder>, with torchrun's variables
"""

import hashlib
import json
import sys
from pathlib import Path

import torch

from model.options import GPTConfig, Positions
from model.score import ScoreConfig
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.ranks import joined
from recipe.distributed.world import World
from recipe.run.build import build_model, build_trainer
from recipe.run.config import Config
from recipe.training.step import Trainer

# 28 million weights: 113 MB, the largest matrix a twelfth of it. Angles and slopes are values without parameters.
CONFIG = Config(
    7,
    model=GPTConfig(n_layers=4, n_heads=8, n_embd=768, positions=Positions.rotary),
    score=ScoreConfig(alibi=True),
    parallel=ParallelConfig(DataParallel.shard),
)


def peak(device: torch.device) -> int:
    """The most bytes of the device that this process has had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()  # getrusage would count a parent's memory
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def digest(trainer: Trainer) -> str:
    """Of the whole model's values."""
    found, model = hashlib.sha256(), trainer.whole_model()
    for tensor in (*model.parameters(), *model.buffers()):
        found.update(tensor.detach().cpu().numpy().tobytes())
    return found.hexdigest()


def main(kind: str, folder: Path) -> None:
    world = World.from_environment()
    device = torch.device("cuda", world.local_rank) if kind == "cuda" else torch.device("cpu")
    with joined(world, device, timeout_s=60):
        small = Config(parallel=CONFIG.parallel)
        model = build_model(small, 256, device, torch.float32, world)
        build_trainer(small, model, device, world)  # imports what it needs
        before = peak(device)
        trainer = build_trainer(CONFIG, build_model(CONFIG, 256, device, torch.float32, world), device, world)
        taken = peak(device) - before
        size = sum(p.numel() * p.itemsize for p in trainer.model.parameters())
        found = {"taken": taken, "size": size, "digest": digest(trainer)}
        (folder / f"{world.rank}-of-{world.size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
