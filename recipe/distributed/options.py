"""The options for sharing a step among ranks, and mistakes in them."""

from dataclasses import dataclass
from enum import Enum

from recipe.distributed.context import rows_unit, shared_by
from recipe.errors import UserError


class ParallelError(UserError, ValueError):
    """A division of the work that is not possible with these ranks; the message says what to change."""


class DataParallel(Enum):
    """The part of weights, gradients and moments that a rank keeps."""

    replicate = "replicate"  # all weights, and AdamW's moments of the rows that it updates
    shard = "shard"  # some rows of each, gathered when needed: less memory, more communication
    shard_grad_op = "shard_grad_op"  # the same, but a block's weights stay gathered until its backward pass


@dataclass
class ParallelConfig:
    """The options under `parallel.*`.

    data     what a rank holds of the weights: all, or some rows (docs/several-gpus.md)
    context  ranks that share the rows of every sequence; 1: each rank has whole sequences
    """

    data: DataParallel = DataParallel.replicate
    context: int = 1

    @property
    def shards(self) -> bool:
        """Whether ranks divide the weights, where there are several."""
        return self.data is not DataParallel.replicate


def check_parallel(config: ParallelConfig, ranks: int) -> None:
    """Raise ParallelError for options that these ranks do not support."""
    if config.context < 1:
        raise ParallelError(f"parallel.context={config.context} must be at least 1, which leaves every sequence whole.")
    if ranks % config.context:
        fitting = max(n for n in range(1, min(config.context, ranks) + 1) if ranks % n == 0)
        raise ParallelError(
            f"parallel.context={config.context} must divide the number of ranks, {ranks}; use "
            f"parallel.context={fitting}, or start {config.context} ranks with torchrun --nproc-per-node "
            f"{config.context}."
        )


def check_context(config: ParallelConfig, seq_len: int, n_heads: int, n_kv_heads: int) -> None:
    """Raise ParallelError where the ranks cannot share a sequence of this length."""
    if config.context <= 1:
        return
    unit = rows_unit(config.context, shared_by(n_heads, n_kv_heads, config.context))
    if seq_len % unit:
        near = sorted({max(unit, seq_len // unit * unit), -(-seq_len // unit) * unit})
        raise ParallelError(
            f"seq_len={seq_len} cannot be shared by parallel.context={config.context} ranks; "
            f"use {' or '.join(f'seq_len={n}' for n in near)}."
        )
