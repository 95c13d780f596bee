"""The measurements in each cell of a sweep, their order by the loss, and crossovers."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from recipe.compare.runs import Run
from recipe.compare.statistics import ALPHA, paired_if_several
from recipe.compare.sweeps import Cell, Sweep, equal_to_the_bit, pairs_of

SPEED = "throughput/tokens_per_s"


class Loss(NamedTuple):
    """A loss over seeds: the mean, and the standard deviation of one seed's; None with a single seed."""

    mean: float
    deviation: float | None


class Speed(NamedTuple):
    """Tokens per second: the median, and the range of most logged steps (the tenth and ninetieth percentile of the
    latter halves of the runs)."""

    median: float
    low: float
    high: float


class Point(NamedTuple):
    """One implementation in one cell: its runs, one a seed, and its length, or place in the sweep."""

    label: str
    cell: Cell
    position: int
    runs: tuple[Run, ...]

    @property
    def measured(self) -> list[Run]:
        """The runs that did not run out of memory."""
        return [run for run in self.runs if not run.out_of_memory]

    @property
    def metric(self) -> str:
        """The loss that was measured: the validation loss, else the training loss."""
        return "train/loss" if self.loss_of("val/loss") is None else "val/loss"

    @property
    def loss(self) -> Loss | None:
        """Its final `metric`; None where a run was cut short or the loss is not finite."""
        loss = self.loss_of(self.metric)
        completed = all(run.status == "completed" for run in self.runs)
        return loss if completed and loss is not None and math.isfinite(loss.mean) else None

    def loss_of(self, metric: str) -> Loss | None:
        """The final losses of the seeds as one; None where no run measured it."""
        losses = [loss for run in self.measured if (loss := run.final(metric)) is not None]
        if not losses:
            return None
        mean = statistics.fmean(losses)
        return Loss(mean, statistics.stdev(losses) if len(losses) > 1 and math.isfinite(mean) else None)

    def median(self, metric: str) -> float | None:
        """The median of the runs' medians."""
        return median_of(run.median(metric) for run in self.measured)

    @property
    def memory_gib(self) -> float | None:
        """The median of the runs' peaks."""
        return median_of(run.peak() for run in self.measured)


def points(sweep: Sweep) -> dict[str, list[Point]]:
    """The measurements of each label, cell by cell."""
    return {
        label: [
            Point(label, cell, sweep.position(cell), tuple(cell.of(label).values()))
            for cell in sweep.cells
            if label in cell.labels()
        ]
        for label in sweep.labels()
    }


def all_points(sweep: Sweep) -> list[Point]:
    """The measurements of all labels in one list, label after label."""
    return [point for of_label in points(sweep).values() for point in of_label]


def speed_of(runs: Sequence[Run]) -> Speed | None:
    """The speed of runs of one implementation in one cell.

    None where no run recorded it, and for a single run on a CPU, which other work of the machine may slow down by half.
    """
    medians = [median for run in runs if (median := run.median(SPEED))]
    if not medians or (len(medians) < 2 and runs[0].recorded("device").get("type") == "cpu"):
        return None
    logged = [run.series(SPEED).finite().values for run in runs]
    low, high = np.percentile(np.concatenate([medians, *(values[len(values) // 2 :] for values in logged)]), (10, 90))
    return Speed(statistics.median(medians), float(low), float(high))


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None without any."""
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def attention_alone(runs: Iterable[Run]) -> bool:
    """Whether memory counts one attention layer alone, as on a CPU."""
    return any(run.summary.get("memory_source") == "attention" for run in runs)


def crossovers(sweep: Sweep, reference: str = "naive") -> dict[str, int | None]:
    """The measured length from which on each implementation is faster than `reference`, for those with lengths in
    common; None where it is not measurably faster at the longest."""
    speeds = {
        label: {point.position: speed for point in series if (speed := speed_of(point.measured))}
        for label, series in points(sweep).items()
    }
    theirs, found = speeds.pop(reference, {}), dict[str, int | None]()
    for label, ours in speeds.items():
        shared = sorted(ours.keys() & theirs.keys())
        if not shared:
            continue
        behind = [T for T in shared if ours[T].median <= theirs[T].median]
        ahead = [T for T in shared if max(behind, default=0) < T]
        found[label] = ahead[0] if ours[shared[-1]].low > theirs[shared[-1]].high else None
    return found


def same_tokens(sweep: Sweep) -> bool:
    """Whether runs of several lengths were trained on equally many tokens, so that their losses compare contexts."""
    trained = [point for point in all_points(sweep) if point.metric == "val/loss"]
    totals = [point.median("tokens") or 0.0 for point in trained]
    return sweep.over_lengths and len({p.position for p in trained}) > 1 and 0 < max(totals) <= 1.02 * min(totals)


class Ranked(NamedTuple):
    """A setting or implementation with a loss.

    seeds       that it and the lowest share
    difference  its loss less the lowest's: the mean over these seeds
    interval    of the difference, which holds for all pairs of a sweep together; None with fewer than two seeds
    equal       whether its runs equal the lowest's bit for bit
    """

    name: str
    point: Point
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
    return sorted(all_points(sweep), key=lambda point: math.inf if point.loss is None else point.loss.mean)


def ranking(sweep: Sweep) -> list[Ranked]:
    """The points that have a loss, the lowest first."""
    found = [point for point in by_loss(sweep) if point.loss]
    level = ALPHA / max(1, math.comb(len(found), 2))
    return [_ranked(point, found[0], level, several=len(sweep.labels()) > 1) for point in found]


def _ranked(point: Point, lowest: Point, level: float, several: bool) -> Ranked:
    assert point.loss
    assert lowest.loss
    pairs = pairs_of(point.cell.of(point.label), lowest.cell.of(lowest.label))
    losses = [(run.final(lowest.metric), other.final(lowest.metric)) for run, other in pairs.values()]
    gaps = [ours - theirs for ours, theirs in losses if ours is not None and theirs is not None]
    test = paired_if_several(gaps)
    where = ", ".join(point.cell.where)
    return Ranked(
        name=f"{point.label}, {where}" if several and where else where or point.label,
        point=point,
        seeds=len(gaps) or 1,
        difference=float(test.mean) if test else point.loss.mean - lowest.loss.mean,
        interval=test.interval(level) if test else None,
        equal=equal_to_the_bit(pairs),
    )
