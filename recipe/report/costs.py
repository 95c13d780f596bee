"""The measurements in each cell of a sweep, and what follows from them: rankings, crossovers, predicted memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from recipe.report.runs import Run, number
from recipe.report.sweeps import Cell, Sweep

GIB = 2**30
# fp32 weights, their gradients, and AdamW's two moments.
STATIC_BYTES_PER_PARAMETER = 16


class Point(NamedTuple):
    """One implementation in one cell: medians over its seeds, None where not measured."""

    label: str
    cell: Cell
    at: int
    runs: tuple[Run, ...]
    out_of_memory: bool
    tokens_per_s: float | None
    step_ms: float | None
    mfu: float | None
    memory_gib: float | None
    train_loss: float | None
    val_loss: float | None
    tokens: float | None
    trained: bool  # at least one run took a step; one killed before that shows nothing

    @property
    def loss(self) -> float | None:
        """The final validation loss, else the training loss; None where a run was cut short or it is not finite."""
        loss = self.train_loss if self.val_loss is None else self.val_loss
        whole = all(run.status == "completed" for run in self.runs)
        return loss if whole and loss is not None and math.isfinite(loss) else None


class Crossover(NamedTuple):
    """The length from which on an implementation is faster than the reference at every measured length.

    seq_len  interpolated between the measured lengths around it; None where there is none
    first    the measured length from which on it is faster; None where it is not faster at the longest
    speedup  over the reference at the longest length that both were measured at
    longest  that length
    """

    label: str
    seq_len: float | None
    first: int | None
    speedup: float
    longest: int


def points(sweep: Sweep) -> dict[str, list[Point]]:
    """The measurements of each label, cell by cell."""
    found = [_point(label, cell, sweep) for cell in sweep.cells for label in cell.labels()]
    return {label: [point for point in found if point.label == label] for label in sweep.labels()}


def _point(label: str, cell: Cell, sweep: Sweep) -> Point:
    runs = tuple(cell.of(label).values())
    done = [run for run in runs if not run.out_of_memory]
    return Point(
        label=label,
        cell=cell,
        at=sweep.at(cell),
        runs=runs,
        out_of_memory=not done,
        trained=any(run.trained for run in runs),
        tokens_per_s=median_of(run.median("throughput/tokens_per_s") for run in done),
        step_ms=median_of(run.median("throughput/step_ms") for run in done),
        mfu=median_of(run.median("throughput/mfu_causal") for run in done),
        memory_gib=median_of(run.peak() for run in done),
        train_loss=median_of(run.final("train/loss") for run in done),
        val_loss=median_of(run.final("val/loss") for run in done),
        tokens=median_of(number(run.summary.get("tokens")) for run in done),
    )


def ranked(sweep: Sweep) -> list[Point]:
    """Every implementation in every cell, the lowest loss first."""
    every = [point for found in points(sweep).values() for point in found]
    return sorted(every, key=lambda point: (point.loss is None, point.loss))


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def attention_alone(runs: Iterable[Run]) -> bool:
    """Whether memory is that of one attention layer, as measured on a CPU."""
    return any(run.summary.get("memory_source") == "attention" for run in runs)


def predicted_memory(sweep: Sweep, label: str) -> list[tuple[int, float]]:
    """(seq_len, GiB) at every length, from the two shortest that were measured.

    tiles    constant + a * T
    scores   constant + a * T + b * T^2, of naive and SDPA's math backend: the constant is 16 bytes a parameter, or
             nothing where the attention alone was measured

    Empty where no more than two were measured, or where the sequences of a micro-batch change with the length.
    """
    measured = [point for point in points(sweep)[label] if point.memory_gib is not None]
    if len(measured) < 3 or sweep.axis != "seq_len" or len({run.sequences for run in sweep.runs}) > 1:
        return []
    run = measured[0].runs[0]
    (T0, gib0), (T1, gib1) = ((point.at, point.memory_gib or 0.0) for point in measured[:2])
    if run.attention == "naive" or (run.attention == "sdpa" and run.option("attention.backend") == "math"):
        parameters = 0.0 if attention_alone([run]) else number(run.summary.get("parameters")) or 0.0
        constant = min(STATIC_BYTES_PER_PARAMETER * parameters / GIB, gib0)
        b = max(0.0, ((gib1 - constant) / T1 - (gib0 - constant) / T0) / (T1 - T0))
        a = (gib0 - constant) / T0 - b * T0
    else:
        a = (gib1 - gib0) / (T1 - T0)
        b, constant = 0.0, gib0 - a * T0
    return [(cell.seq_len, constant + a * cell.seq_len + b * cell.seq_len**2) for cell in sweep.cells]


def crossovers(sweep: Sweep, reference: str = "naive") -> list[Crossover]:
    """The length from which on each implementation is faster than `reference`, for those with lengths in common."""
    times = {
        label: {point.at: point.step_ms for point in found if point.step_ms} for label, found in points(sweep).items()
    }
    theirs = times.get(reference, {})
    found = []
    for label, ours in times.items():
        shared = sorted(ours.keys() & theirs.keys())
        if label == reference or not shared:
            continue
        gains = [math.log(theirs[T] / ours[T]) for T in shared]
        lasting = next((n for n in range(len(gains)) if min(gains[n:]) > 0), None)
        at = None
        if lasting:  # straight lines in the logarithms of time and length
            (T0, T1), (g0, g1) = map(math.log, shared[lasting - 1 : lasting + 1]), gains[lasting - 1 : lasting + 1]
            at = math.exp(T0 + (T1 - T0) * -g0 / (g1 - g0))
        first = None if lasting is None else shared[lasting]
        found.append(Crossover(label, at, first, math.exp(gains[-1]), shared[-1]))
    return found


def same_tokens(sweep: Sweep) -> bool:
    """Whether runs of several lengths were trained on equally many tokens, so that their losses compare contexts."""
    trained = [point for found in points(sweep).values() for point in found if point.val_loss is not None]
    totals = [point.tokens or 0.0 for point in trained]
    return sweep.axis == "seq_len" and len({p.at for p in trained}) > 1 and 0 < max(totals) <= 1.02 * min(totals)
