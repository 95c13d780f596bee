"""The measurements in each cell of a sweep, their order by the loss, and crossovers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from recipe.compare.runs import Run, number
from recipe.compare.statistics import ALPHA, paired
from recipe.compare.sweeps import Cell, Sweep, equal_to_the_bit, pairs_of


class Loss(NamedTuple):
    """A loss over seeds: the mean, and the standard deviation of one seed's; None with a single seed."""

    mean: float
    deviation: float | None
    seeds: int


class Speed(NamedTuple):
    """Tokens per second: the median, and the range of most logged steps of all runs (the tenth and ninetieth percentile
    of each run's latter half)."""

    median: float
    low: float
    high: float

    def above(self, other: Speed) -> bool:
        """Whether all of the range lies above another, so that the difference is no chance."""
        return self.low > other.high


class Point(NamedTuple):
    """One implementation in one cell: losses over its seeds, and medians of its costs. None where not measured."""

    label: str
    cell: Cell
    position: int
    runs: tuple[Run, ...]
    out_of_memory: bool
    tokens_per_s: float | None
    step_ms: float | None
    mfu: float | None
    memory_gib: float | None
    speed: Speed | None
    train_loss: Loss | None
    val_loss: Loss | None
    tokens: float | None
    trained: bool  # at least one run took a step; runs killed before that show nothing

    @property
    def loss(self) -> Loss | None:
        """The final validation loss, else the training loss; None where a run was cut short or it is not finite."""
        loss = self.train_loss if self.val_loss is None else self.val_loss
        whole = all(run.status == "completed" for run in self.runs)
        return loss if whole and loss is not None and math.isfinite(loss.mean) else None


class Crossover(NamedTuple):
    """The length from which on an implementation is faster than the reference at every measured length.

    seq_len  interpolated between the measured lengths around it; None where there is none
    first    the measured length from which on it is faster; None where it is not measurably faster at the longest
    """

    label: str
    seq_len: float | None
    first: int | None


def points(sweep: Sweep) -> dict[str, list[Point]]:
    """The measurements of each label, cell by cell."""
    every = [_point(label, cell, sweep) for cell in sweep.cells for label in cell.labels()]
    return {label: [point for point in every if point.label == label] for label in sweep.labels()}


def _point(label: str, cell: Cell, sweep: Sweep) -> Point:
    runs = tuple(cell.of(label).values())
    done = [run for run in runs if not run.out_of_memory]
    return Point(
        label=label,
        cell=cell,
        position=sweep.position(cell),
        runs=runs,
        out_of_memory=not done,
        trained=any(run.trained for run in runs),
        tokens_per_s=median_of(run.median("throughput/tokens_per_s") for run in done),
        step_ms=median_of(run.median("throughput/step_ms") for run in done),
        mfu=median_of(run.median("throughput/mfu_causal") for run in done),
        memory_gib=median_of(run.peak() for run in done),
        speed=speed_of(done),
        train_loss=loss_of(run.final("train/loss") for run in done),
        val_loss=loss_of(run.final("val/loss") for run in done),
        tokens=median_of(number(run.summary.get("tokens")) for run in done),
    )


def loss_of(losses: Iterable[float | None]) -> Loss | None:
    """The known losses of several seeds as one; None without any."""
    measured = [loss for loss in losses if loss is not None]
    if not measured:
        return None
    mean = statistics.fmean(measured)
    deviation = statistics.stdev(measured) if len(measured) > 1 and math.isfinite(mean) else None
    return Loss(mean, deviation, len(measured))


def speed_of(runs: Sequence[Run]) -> Speed | None:
    """The speed of runs of one implementation in one cell.

    None where no run recorded it, and for a single run on a CPU, which other work of the machine may slow down by half.
    """
    measured = [run for run in runs if run.median("throughput/tokens_per_s")]
    if not measured or (len(measured) < 2 and measured[0].recorded("device").get("type") == "cpu"):
        return None
    medians = [run.median("throughput/tokens_per_s") or 0.0 for run in measured]
    ends = [end for run, median in zip(measured, medians, strict=True) for end in _most_steps(run, median)]
    return Speed(statistics.median(medians), min(ends), max(ends))


def _most_steps(run: Run, median: float) -> tuple[float, float]:
    """The range of most logged steps of a run, which holds its median."""
    values = run.series("throughput/tokens_per_s").finite().values
    if not len(values):
        return median, median
    low, high = np.percentile(values[len(values) // 2 :], (10, 90))
    return min(float(low), median), max(float(high), median)


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None without any."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def attention_alone(runs: Iterable[Run]) -> bool:
    """Whether memory counts one attention layer alone, as on a CPU."""
    return any(run.summary.get("memory_source") == "attention" for run in runs)


def crossovers(sweep: Sweep, reference: str = "naive") -> list[Crossover]:
    """The length from which on each implementation is faster than `reference`, for those with lengths in common."""
    speeds = {
        label: {point.position: point.speed for point in series if point.speed}
        for label, series in points(sweep).items()
    }
    theirs = speeds.get(reference, {})
    crossovers = []
    for label, ours in speeds.items():
        shared = sorted(ours.keys() & theirs.keys())
        if label == reference or not shared:
            continue
        gains = [math.log(ours[T].median / theirs[T].median) for T in shared]
        faster = ours[shared[-1]].above(theirs[shared[-1]])
        lasting = next((n for n in range(len(gains)) if faster and min(gains[n:]) > 0), None)
        length = None
        if lasting:  # straight lines in the logarithms of time and length
            (T0, T1), (g0, g1) = map(math.log, shared[lasting - 1 : lasting + 1]), gains[lasting - 1 : lasting + 1]
            length = math.exp(T0 + (T1 - T0) * -g0 / (g1 - g0))
        first = None if lasting is None else shared[lasting]
        crossovers.append(Crossover(label, length, first))
    return crossovers


def same_tokens(sweep: Sweep) -> bool:
    """Whether runs of several lengths were trained on equally many tokens, so that their losses compare contexts."""
    trained = [point for of_label in points(sweep).values() for point in of_label if point.val_loss is not None]
    totals = [point.tokens or 0.0 for point in trained]
    return sweep.axis == "seq_len" and len({p.position for p in trained}) > 1 and 0 < max(totals) <= 1.02 * min(totals)


class Ranked(NamedTuple):
    """A setting or implementation with a loss.

    kind        of the loss: validation or training
    seeds       that it and the lowest share
    difference  its loss less the lowest's: the mean over these seeds
    interval    of the difference, which holds for all pairs of a sweep together; None with fewer than two seeds
    equal       whether its runs equal the lowest's bit for bit
    """

    name: str
    point: Point
    kind: str
    seeds: int
    difference: float
    interval: tuple[float, float] | None
    equal: bool

    @property
    def higher(self) -> bool:
        """Whether the loss is higher than the lowest beyond chance."""
        return self.interval is not None and self.interval[0] > 0


def by_loss(sweep: Sweep) -> list[Point]:
    """Every implementation in every cell, the lowest loss first."""
    every = [point for of_label in points(sweep).values() for point in of_label]
    return sorted(every, key=lambda point: math.inf if point.loss is None else point.loss.mean)


def ranking(sweep: Sweep) -> list[Ranked]:
    """The points that have a loss, the lowest first."""
    found = [point for point in by_loss(sweep) if point.loss]
    level = ALPHA / max(1, math.comb(len(found), 2))
    several = len(sweep.labels()) > 1
    return [_ranked(point, found[0], level, several) for point in found]


def _ranked(point: Point, lowest: Point, level: float, several: bool) -> Ranked:
    kind = "training" if lowest.val_loss is None else "validation"
    metric = "train/loss" if lowest.val_loss is None else "val/loss"
    pairs = pairs_of({run.seed: run for run in point.runs}, {run.seed: run for run in lowest.runs})
    losses = [(run.final(metric), other.final(metric)) for run, other in pairs.values()]
    gaps = [ours - theirs for ours, theirs in losses if ours is not None and theirs is not None]
    mean = (point.loss.mean if point.loss else math.nan) - (lowest.loss.mean if lowest.loss else math.nan)
    test = paired(gaps) if len(gaps) > 1 else None
    where = ", ".join(point.cell.where)
    name = f"{point.label}, {where}" if several and where else where or point.label
    return Ranked(
        name=name,
        point=point,
        kind=kind,
        seeds=len(gaps) or 1,
        difference=float(test.mean) if test else mean,
        interval=test.interval(level) if test else None,
        equal=bool(pairs) and all(equal_to_the_bit(*pair) for pair in pairs.values()),
    )
