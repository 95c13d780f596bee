"""What of a training step is compiled, and what is replayed as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention import DropoutRng
from model.gpt import GPT
from model.options import Recompute
from recipe.training.options import TrainingConfig

# Else the compiler times several orders of a sum and takes the fastest, which differs between ranks and runs.
COMPILER_OPTIONS: dict[str, Any] = {"deterministic": True}


def compiled(model: GPT, in_blocks: bool) -> Callable[..., Tensor]:
    """The model, compiled as one, or each block.

    FSDP2 gathers weights between blocks, so blocks are compiled one by one; also on one rank, for the same bits. The
    compiler does not look into mixers, and would compile each block around them anew.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_no_reminder_of_policies)
    if not in_blocks:
        return torch.compile(model, options=COMPILER_OPTIONS)
    for block in (*model.h, *([] if model.further is None else [model.further.block])):
        # Without FSDP2's hooks, which block.compile() would trace.
        block.forward = torch.compile(block.forward, options=COMPILER_OPTIONS)
    return model


def can_replay(training: TrainingConfig, rng: DropoutRng, micro_steps: int, in_blocks: bool, mixes: bool) -> bool:
    """Whether a step on a GPU can be replayed as a CUDA graph.

    rng        of the attention's dropout
    in_blocks  whether the model is compiled block by block
    mixes      whether it has mixers
    """
    # A replay takes the generators' seed once, and each micro-step has a different one.
    reseeds = rng is DropoutRng.torch and micro_steps > 1
    # Outside compiled code, recomputation saves the generators' states, which cannot be read while recording.
    recomputes = in_blocks and training.recompute is not Recompute.none
    # A profile assigns kernels to the operations that launch them; a replay has no such operations.
    # Chunks that begin at each document are counted on the host; the package's kernels tune themselves.
    return training.compile and not (reseeds or recomputes or mixes or training.profile)


def is_no_reminder_of_policies(record: logging.LogRecord) -> bool:
    """Whether a record of torch's log is anything but the reminder that recomputed code with a policy, which is what
    model/blocks.py compiles, may contain no operator that works in place. It contains none."""
    return "context_fn is passed" not in record.getMessage()
