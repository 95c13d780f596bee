"""Runs and models that do not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.config import GPTConfig
from recipe.errors import UserError
from recipe.training.step import Trainer

# In messages about exhausted memory: of torch's allocators, and of the system when a thread gets no stack.
SIGNS_OF_FULL_MEMORY = ("out of memory", "allocate memory", "can't start new thread", "temporarily unavailable")


class OutOfMemory(UserError, RuntimeError):
    """The run did not fit into memory; the message says how to make it smaller."""


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
