"""How the work of a step is shared by several ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from errors import UserError


class ParallelError(UserError, ValueError):
    """A way of sharing the work that these ranks cannot; the message says what to change."""


class DataParallel(Enum):
    """What a rank keeps of weights, gradients and moments."""

    replicate = "replicate"  # everything
    shard = "shard"  # some rows of each, gathered where they are needed: less memory, more communication


@dataclass
class ParallelConfig:
    """What a user chooses under `parallel.*`.

    data       what each rank keeps of weights, gradients and moments
    exact      add gradients in an order that does not depend on the number of ranks: the same losses, bit for bit
    timeout_s  seconds to wait for another rank before giving up
    """

    data: DataParallel = DataParallel.replicate
    exact: bool = True
    timeout_s: float = 600.0


def check_parallel(config: ParallelConfig, ranks: int) -> None:
    """Raise ParallelError for what these ranks cannot do."""
    if config.exact and ranks & (ranks - 1):
        raise ParallelError(
            f"{ranks} ranks cannot add gradients in the order of one (parallel.exact=true); start "
            f"{2 ** (ranks.bit_length() - 1)} or {2 ** ranks.bit_length()} ranks, or set parallel.exact=false."
        )
    if not (math.isfinite(config.timeout_s) and config.timeout_s > 0):
        raise ParallelError(f"parallel.timeout_s={config.timeout_s} must be a number of seconds above 0.")
