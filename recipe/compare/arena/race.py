"""The cost with which an arm reaches the baseline's final loss."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import numpy as np

from recipe.compare.arena.results import LOSS, ArmRuns, result
from recipe.compare.pairing import pairs_of
from recipe.compare.runs import Run
from recipe.files import number


class Race(NamedTuple):
    """The cost with which an arm reaches the baseline's final loss at the same seed.

    reached          seeds that do, of `pairs`
    tokens, seconds  means over these seeds; seconds of training alone
    less             the baseline's tokens over the arm's, and its seconds over the arm's: geometric means. None unless
                     all seeds reach the loss, as the others would have cost more
    """

    reached: int
    pairs: int
    tokens: float
    seconds: float
    less: tuple[float, float] | None


def race(arm: ArmRuns, baseline: ArmRuns) -> Race | None:
    """None where no seed reaches the loss, or nothing is known of the steps' time."""
    costs, pairs = [], pairs_of(arm.runs, baseline.runs)
    for run, other in pairs.values():
        target, milliseconds = result(other), [one.median("throughput/step_ms") for one in (run, other)]
        step = None if target is None else step_to(run, target)
        tokens = number(run.summary.get("tokens"))
        if step and tokens and all(milliseconds):
            ours, theirs = (float(ms or 0) / 1e3 for ms in milliseconds)
            per_step = tokens / run.step
            costs.append((step * per_step, step * ours, other.step / step, other.step * theirs / (step * ours)))
    if not costs:
        return None
    tokens_to, seconds, *less = zip(*costs, strict=True)
    fewer, faster = map(statistics.geometric_mean, less)
    ratios = (fewer, faster) if len(costs) == len(pairs) else None
    return Race(len(costs), len(pairs), statistics.fmean(tokens_to), statistics.fmean(seconds), ratios)


def step_to(run: Run, target: float) -> float | None:
    """The first step with a validation loss of at most the target, on straight lines between two evaluations."""
    steps, values = run.series(LOSS)
    below = np.flatnonzero(np.asarray(values) <= target)
    if not len(below):
        return None
    first = int(below[0])
    if first == 0:
        return float(steps[0])
    (before, after), (high, low) = steps[first - 1 : first + 1], values[first - 1 : first + 1]
    return float(after - (after - before) * (target - low) / (high - low))
