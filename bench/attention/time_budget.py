"""Predicts from shorter problems which longer ones would take too long."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


class TooSlow(Exception):
    """A step was skipped, because it would take too long."""


class TimeBudget:
    """Predicts from shorter lengths how long a step will take."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.seen: dict[tuple[Any, ...], list[tuple[int, float]]] = {}

    def learn(self, rows: Iterable[Row]) -> None:
        """Remember the times of measured rows."""
        for row in rows:
            if "step_s" in row:
                self.seen.setdefault(self.series(row), []).append((row["length"], row["step_s"]))

    def check(self, row: Row) -> None:
        """Raise TooSlow if a step of the row's problem is likely to exceed the limit.

        At a constant number of tokens the work grows with the length, and the number of tile launches with its square.
        """
        seen = self.seen.get(self.series(row))
        if not seen:
            return
        length, step_s = seen[-1]
        power = 2.0
        if len(seen) > 1:
            shorter, less_s = seen[-2]
            power = min(2.0, max(1.0, math.log(step_s / less_s) / math.log(length / shorter)))
        expected_s = step_s * (row["length"] / length) ** power
        if expected_s > self.limit_s:
            raise TooSlow(
                f"one step took {step_s:.2g} s at {length} tokens and may take {expected_s:.2g} s here, "
                f"more than --limit {self.limit_s:g}"
            )

    @staticmethod
    def series(row: Row) -> tuple[Any, ...]:
        return tuple(row[field] for field in ("name", "head_size", "variant", "dropout"))
