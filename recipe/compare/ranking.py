"""The settings or implementations of a sweep in the order of their losses, with paired differences to the lowest."""

from __future__ import annotations

import math
from typing import NamedTuple

from recipe.compare.costs import Point, points
from recipe.compare.pairing import equal_to_the_bit, pairs_of
from recipe.compare.statistics import ALPHA, paired
from recipe.compare.sweeps import Sweep


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
