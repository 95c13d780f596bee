"""How the work of a step is shared by several ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from errors import UserError


class ParallelError(UserError, ValueError):
    """A way of sharing the work that these ranks cannot; the message says what to change."""


@dataclass
class ParallelConfig:
    """What a user chooses under `parallel.*`.

    timeout_s  seconds to wait for another rank before giving up
    """

    timeout_s: float = 600.0


def check_parallel(config: ParallelConfig) -> None:
    """Raise ParallelError for a value that no run can have."""
    if not (math.isfinite(config.timeout_s) and config.timeout_s > 0):
        raise ParallelError(f"parallel.timeout_s={config.timeout_s} must be a number of seconds above 0.")
