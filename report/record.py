"""What one run says, as plain data: its settings, its metrics over steps, and its summary."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = "unknown device"


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was logged, in order: (n,) int64 and (n,) float64."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def last(self) -> float | None:
        """The last value, or None where nothing was logged."""
        return float(self.values[-1]) if len(self) else None

    def finite(self) -> Series:
        """Without what is not a number, or infinite."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


EMPTY = Series(np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True)
class Run:
    """What one run folder says.

    name       the folder's path below the sweep
    label      the implementation, with the options that set it apart from others of its name ("tiled 16x16")
    status     completed, interrupted, failed, out_of_memory; unfinished where no summary was written
    config     nested, as composed
    metrics    by name, as in metrics.jsonl
    texts      metrics that are words (parity/worst_parameter), by name and step
    notes      what had to be read around, one sentence each
    """

    folder: Path
    name: str
    label: str
    status: str
    config: Mapping[str, Any]
    metrics: Mapping[str, Series] = field(default_factory=dict)
    texts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        """A setting by its dotted name: `run.option("training.steps")`."""
        value: Any = self.config
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return value

    def series(self, metric: str) -> Series:
        """A metric over steps; empty where it was never logged."""
        return self.metrics.get(metric, EMPTY)

    def recorded(self, part: str) -> Mapping[str, Any]:
        """A part of the summary that has parts of its own, such as `versions`; empty where it is missing or damaged."""
        value = self.summary.get(part)
        return value if isinstance(value, Mapping) else {}

    @property
    def attention(self) -> str:
        return str(self.option("attention.name", self.summary.get("attention", "unknown")))

    @property
    def seed(self) -> int:
        return int(number(self.option("seed")) or 0)

    @property
    def seq_len(self) -> int:
        return int(number(self.option("seq_len")) or 0)

    @property
    def sequences(self) -> int:
        """Sequences that a device takes at once."""
        return int(number(self.option("training.batch_size")) or 1)

    @property
    def step(self) -> int:
        """Updates done."""
        logged = [int(s.steps[-1]) for s in self.metrics.values() if len(s)]
        return int(number(self.summary.get("step")) or max(logged, default=0))

    @property
    def precision(self) -> str:
        return str(self.summary.get("precision") or self.option("training.precision", "auto"))

    @property
    def device(self) -> str:
        """The device in words, with the number of ranks where there are several; UNKNOWN without a summary."""
        device = self.recorded("device")
        name, count = str(device.get("name") or device.get("type") or UNKNOWN), number(device.get("count")) or 1
        return f"{count:g} x {name}" if count > 1 else name

    @property
    def commit(self) -> str:
        """Abbreviated, with `+` where the tree had uncommitted changes; empty where unknown."""
        git = self.recorded("git")
        commit = str(git.get("commit") or "")[:7]
        return f"{commit}+" if commit and git.get("dirty") else commit

    @property
    def out_of_memory(self) -> bool:
        return self.status == "out_of_memory"

    def median(self, metric: str) -> float | None:
        """The run's median of a throughput metric: the summary's, else over the latter half of what was logged."""
        value = number(self.recorded("median").get(metric))
        if value is None and len(finite := self.series(metric).finite()):
            value = float(np.median(finite.values[len(finite) // 2 :]))
        return value

    def peak(self, metric: str = "memory/peak_allocated_gib") -> float | None:
        """The run's peak of a memory metric, GiB."""
        value = number(self.recorded("peak").get(metric))
        if value is None and len(finite := self.series(metric).finite()):
            value = float(np.max(finite.values))
        return value

    def final(self, metric: str) -> float | None:
        """The last value of `train/loss` or `val/loss`."""
        value = number(self.summary.get(metric.replace("/", "_")))
        return self.series(metric).last() if value is None else value

    def best_val_loss(self) -> float | None:
        value = number(self.summary.get("best_val_loss"))
        if value is None and len(finite := self.series("val/loss").finite()):
            value = float(np.min(finite.values))
        return value

    def tokens(self) -> float | None:
        """Tokens trained on."""
        return number(self.summary.get("tokens"))

    def diverged(self) -> int | None:
        """The first step whose loss or gradient is known not to be finite; None where all are finite.

        train.py stops before it logs such a step, and names it in the summary's message.
        """
        losses = [self.series("train/loss"), self.series("val/loss")]
        steps = [int(step) for s in losses for step in s.steps[~np.isfinite(s.values)]]
        message = str(self.summary.get("message"))
        if self.status == "failed" and "not finite" in message:
            named = re.match(r"Step (\d+) was not finite", message)
            steps.append(int(named[1]) if named else self.step + 1)
        return min(steps, default=None)


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
