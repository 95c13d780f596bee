"""Runs and models that do not fit into memory, and a limit to the memory of the process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.options import GPTConfig
from recipe.errors import UserError
from recipe.training.step import Trainer

# In messages about exhausted memory: of torch's allocators, and of the system when a thread gets no stack.
SIGNS_OF_FULL_MEMORY = ("out of memory", "allocate memory", "can't start new thread", "temporarily unavailable")


class OutOfMemory(UserError, RuntimeError):
    """The run did not fit into memory; the message says how to make it smaller."""


class MemoryLimitError(UserError, RuntimeError):
    """A limit that this system does not support; the message says what to change."""


@contextmanager
def oom_guard(sentence: str) -> Iterator[None]:
    """Turn running out of memory into OutOfMemory with `sentence`, which names the problem and a remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS_OF_FULL_MEMORY):
            raise
        raise OutOfMemory(sentence) from error


def too_large_model(model: GPTConfig, device: torch.device) -> str:
    """The sentence for a model that does not fit even without training."""
    return (
        f"A model with model.n_layers={model.n_layers} and model.n_embd={model.n_embd} does not fit in the memory of "
        f"{device} with gradients and optimizer state; choose smaller ones, or a device with more memory."
    )


def too_large_step(trainer: Trainer) -> str:
    """The sentence for a training step that does not fit."""
    model, training = trainer.model, trainer.training
    linear = "an attention whose memory is linear in seq_len (attention=flash on a GPU, tiled or sdpa), "
    return (
        f"attention={model.attend.name} with seq_len={model.seq_len} and training.batch_size={training.batch_size} "
        f"does not fit in the memory of {trainer.device}; use {linear if model.attend.name == 'naive' else ''}"
        "training.recompute=block, or a smaller training.batch_size with training.batch_tokens to keep the tokens of a "
        "step."
    )


@contextmanager
def cpu_memory_limit(gib: float | None) -> Iterator[None]:
    """Within the block this process runs out of memory at `gib` GiB, like a GPU of that size; None: no limit. An
    allocation beyond the limit raises RuntimeError.

    Raises MemoryLimitError.
    """
    if gib is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), hard))
    except (ValueError, OSError) as error:
        raise MemoryLimitError(
            f"training.cpu.memory_gib={gib:g} cannot be set here ({error}); use training.cpu.memory_gib=null."
        ) from error
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
