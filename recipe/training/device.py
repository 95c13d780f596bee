"""The device and precision of a run; what does not fit into memory, and a limit to the process's."""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import torch

from recipe.distributed.world import World
from recipe.errors import UserError

# In messages about exhausted memory: of torch's allocators, and of the system when a thread gets no stack.
SIGNS_OF_FULL_MEMORY = ("out of memory", "allocate memory", "can't start new thread", "temporarily unavailable")


class OutOfMemory(UserError, RuntimeError):
    """The run did not fit into memory; the message says how to make it smaller."""


class Precision(Enum):
    """The precision of the model's computations. Weights, moments and the loss are always fp32."""

    auto = "auto"  # bf16 on a GPU, fp32 on a CPU
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"  # with a scaled loss

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype; `auto` has none."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]


def resolve_device(name: str) -> torch.device:
    """The device that `device=name` means here: auto, cpu, cuda or cuda:N. Raises UserError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and (kind == "cpu" or not index.isdecimal())):
        raise UserError(f"device={name} is not known; choose one of auto, cpu, cuda, cuda:0, cuda:1 and so on.")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise UserError(f"device={name} needs a CUDA GPU, and torch finds none here; use device=cpu.")
    number = int(index) if index else World.from_environment().local_rank
    if not index and count == 1 and "SLURM_STEP_NUM_TASKS" in os.environ:
        number = 0  # srun --gpus-per-task=1 shows each task a single GPU
    if number >= count:
        raise UserError(
            f"device={name} is more than the {count} GPUs that torch finds here (cuda:0 to cuda:{count - 1})."
        )
    return torch.device("cuda", number)


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on `device`; inf where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024.0 * next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """The given precision, or the one that `auto` stands for on `device`."""
    if precision is not Precision.auto:
        return precision
    return Precision.bf16 if device.type == "cuda" else Precision.fp32


@contextmanager
def oom_guard(sentence: str) -> Iterator[None]:
    """Turn running out of memory into OutOfMemory with `sentence`, which names the problem and a remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS_OF_FULL_MEMORY):
            raise
        raise OutOfMemory(sentence) from error


@contextmanager
def cpu_memory_limit(gib: float | None) -> Iterator[None]:
    """Within the block this process runs out of memory at `gib` GiB, like a GPU of that size; None: no limit. An
    allocation beyond the limit raises RuntimeError.
    """
    if gib is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
