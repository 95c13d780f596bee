"""Numbers from the runs of an arena: differences to the baseline, verdicts, readings at equal cost, sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipe.compare.runs import Run, Series
from recipe.compare.statistics import (
    ALPHA,
    Paired,
    Verdict,
    holm_levels,
    judge,
    paired,
    seeds_to_decide,
    sign_flip,
    signed_rank,
)
from recipe.compare.sweeps import by_seed, difference, equal_to_the_bit, pairs_of
from recipe.files import number
from recipe.run.plan import Plan, PlannedRun

LOSS = "val/loss"
SOLVED = 0.01  # of wrong answers
Interval = tuple[float, float]


class Reading(NamedTuple):
    """The difference to the baseline where both have cost as much, and its 95 % interval."""

    mean: float
    interval: Interval


@dataclass(frozen=True)
class Tried:
    """The result of a learning rate: the mean loss over the seeds of the sweep, infinite where one diverged."""

    lr: float
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses) if self.losses else math.inf


@dataclass(frozen=True)
class ArmRuns:
    """The runs of an arm on the seeds of the plan, and the runs that tried learning rates.

    losses  of each seed: its final validation loss or share of wrong answers, infinite where it diverged. Runs without
            a result are left out.
    """

    name: str
    runs: Mapping[int, Run]
    losses: Mapping[int, float]
    tried: tuple[Tried, ...]
    lr: float | None

    @property
    def diverged(self) -> list[int]:
        """The seeds whose loss is not finite."""
        return [seed for seed, loss in self.losses.items() if math.isinf(loss)]

    @property
    def loss(self) -> float | None:
        """The mean over the seeds that have a finite loss."""
        finite = [loss for loss in self.losses.values() if math.isfinite(loss)]
        return statistics.fmean(finite) if finite else None

    @property
    def lr_at_edge(self) -> bool:
        """Whether the best of the learning rates that were tried is the lowest or the highest of them."""
        return len(self.tried) > 1 and self.lr in (self.tried[0].lr, self.tried[-1].lr)

    def over_seeds(self, metric: str) -> list[float]:
        """A throughput metric's median of each run."""
        return [value for run in self.runs.values() if (value := run.median(metric)) is not None]

    def recorded(self, name: str) -> float | None:
        """A number of the summaries: the median over the runs."""
        numbers = [value for run in self.runs.values() if (value := number(run.summary.get(name))) is not None]
        return statistics.median(numbers) if numbers else None


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline.

    differences  of the final losses, by seed; infinite where one of them diverged
    missing      seeds of the plan that lack the arm's result or the baseline's
    test         None with fewer than two finite differences
    level        the level that Holm's correction and the planned looks leave to this arm
    margin       in loss
    more         seeds to add so that the verdict is decided; None where it is, or where no number would do
    time, flops  where arm and baseline have taken equal time, or as many operations; None where that is unknown
    """

    arm: ArmRuns
    baseline: ArmRuns
    differences: Mapping[int, float]
    missing: tuple[int, ...]
    test: Paired | None
    p: float
    p_sign_flip: float | None
    level: float
    margin: float
    verdict: Verdict
    more: int | None
    time: Reading | None
    flops: Reading | None

    @property
    def interval(self) -> Interval | None:
        """At the arm's level; the verdict follows from it."""
        return self.test.interval(self.level) if self.test else None

    @property
    def diverged(self) -> list[int]:
        """The seeds in which the arm diverged, or the baseline."""
        return [seed for seed, difference in self.differences.items() if not math.isfinite(difference)]

    @property
    def equal(self) -> bool:
        """Whether every run logged the losses of its partner, bit for bit."""
        pairs = pairs_of(self.arm.runs, self.baseline.runs)
        return bool(pairs) and all(equal_to_the_bit(*pair) for pair in pairs.values())

    @property
    def share(self) -> float | None:
        """The mean difference as a share of the baseline's loss; None where that loss is the smaller of the two."""
        if self.test is None or not self.baseline.loss or abs(self.test.mean) > self.baseline.loss:
            return None
        return self.test.mean / self.baseline.loss


@dataclass(frozen=True)
class Arena:
    """The plan, the runs, and the comparisons in the order of the plan.

    task  the data set whose answers are judged; None where the validation loss is
    """

    plan: Plan
    arms: Mapping[str, ArmRuns]
    comparisons: tuple[Comparison, ...]
    runs: Mapping[int, Run]
    task: str | None

    @property
    def quantity(self) -> str:
        """What is judged; less is better."""
        return "wrong answers" if self.task else "val loss"

    def solved(self, arm: ArmRuns) -> bool:
        """Whether an arm answers the task with every planned seed, but for SOLVED."""
        complete = len(arm.losses) == len(self.plan.seeds)
        return self.task is not None and complete and max(arm.losses.values()) <= SOLVED

    @property
    def baseline(self) -> ArmRuns:
        return self.arms[self.plan.baseline]


def result(run: Run, task: str | None = None) -> float | None:
    """The final validation loss of a run, or its share of wrong answers; infinite where it diverged, None where it has
    no result."""
    if run.diverged() is not None:
        return math.inf
    if run.status != "completed":
        return None
    if task is None:
        return run.final(LOSS)
    right = run.series(f"probe/{task}").finite().last()
    return None if right is None else 1 - right


def task_of(runs: Sequence[Run]) -> str | None:
    """The data set of all runs, where a probe of that name measured the share of right answers; else None."""
    names = {str(run.option("data.name")) for run in runs}
    name = names.pop() if len(names) == 1 else ""
    return name if any(f"probe/{name}" in run.metrics for run in runs) else None


def compare_arms(plan: Plan, runs: Sequence[Run]) -> Arena:
    """The comparisons of a plan's arms with its baseline.

    runs  in the sweep's folder; their names are the numbers of the plan
    """
    by_number, task = {int(run.name): run for run in runs if run.name.isdigit()}, task_of(runs)
    arms = {arm: _arm_runs(plan, arm, by_number, task) for arm in plan.arms}
    pairs = {arm: _differences(arms[arm], arms[plan.baseline]) for arm in plan.others}
    p_values = {arm: _p_value(plan, differences) for arm, differences in pairs.items()}
    levels = dict(zip(pairs, holm_levels(list(p_values.values()), ALPHA / plan.planned_looks), strict=True))
    comparisons = [
        _compare(plan, arms[arm], arms[plan.baseline], pairs[arm], p_values[arm], levels[arm], task) for arm in pairs
    ]
    return Arena(plan, arms, tuple(comparisons), by_number, task)


def _arm_runs(plan: Plan, arm: str, runs: Mapping[int, Run], task: str | None) -> ArmRuns:
    def of(planned: Sequence[PlannedRun]) -> list[tuple[PlannedRun, Run]]:
        return [(one, runs[one.number]) for one in planned if one.arm == arm and one.number in runs]

    losses: dict[float, list[float]] = {lr: [] for lr in plan.lr[arm]} if len(plan.lr[arm]) > 1 else {}
    for planned, run in of(plan.lr_runs()):
        loss = result(run, task)
        if planned.lr is not None and (loss is not None or run.out_of_memory):
            losses[planned.lr].append(math.inf if loss is None else loss)
    tried = tuple(Tried(lr, tuple(of_rate)) for lr, of_rate in losses.items())
    seeds = [one for one in plan.seed_runs() if one.size == plan.layers[-1]]
    trained = by_seed(run for _, run in of(seeds))
    results = {seed: loss for seed, run in trained.items() if (loss := result(run, task)) is not None}
    return ArmRuns(arm, trained, results, tried, next(s.lr for s in seeds if s.arm == arm))


def _differences(arm: ArmRuns, baseline: ArmRuns) -> dict[int, float]:
    """Arm - baseline by seed; 0 where both diverged."""
    pairs = {seed: (loss, baseline.losses[seed]) for seed, loss in arm.losses.items() if seed in baseline.losses}
    return {seed: 0.0 if ours == theirs else ours - theirs for seed, (ours, theirs) in pairs.items()}


def _p_value(plan: Plan, differences: Mapping[int, float]) -> float:
    """Of the paired t-test, and of the signed-rank test where a run diverged; 1 while runs of the plan are missing."""
    values = list(differences.values())
    if len(values) < len(plan.seeds):
        return 1.0
    return float(paired(values).p) if all(map(math.isfinite, values)) else signed_rank(values)


def _compare(
    plan: Plan,
    arm: ArmRuns,
    baseline: ArmRuns,
    differences: Mapping[int, float],
    p: float,
    level: float,
    task: str | None,
) -> Comparison:
    values = np.array(list(differences.values()))
    finite = values[np.isfinite(values)]
    test = paired(finite) if len(finite) > 1 else None
    margin = plan.margin * (1.0 if task else baseline.loss or 0.0)  # of all answers, or of the loss
    missing = tuple(seed for seed in plan.seeds if seed not in differences)
    verdict = Verdict.undecided
    if not missing and len(finite) < len(values):  # an infinite difference has no mean: its rank decides
        if p <= level:
            verdict = Verdict.worse if np.sum(np.sign(values)) > 0 else Verdict.better
    elif not missing and test:
        verdict = judge(test.interval(level), margin)
    more = None
    if verdict is Verdict.undecided and test and not missing and len(finite) == len(values):
        needed = seeds_to_decide(test, margin, level)
        more = None if needed is None else needed - test.n
    pairs = pairs_of(arm.runs, baseline.runs)
    return Comparison(
        arm=arm,
        baseline=baseline,
        differences=differences,
        missing=missing,
        test=test,
        p=p,
        p_sign_flip=sign_flip(finite) if len(finite) > 1 and len(finite) == len(values) else None,
        level=level,
        margin=margin,
        verdict=verdict,
        more=more,
        time=_reading([_at_equal_cost(*pair, "throughput/step_ms") for pair in pairs.values()]),
        flops=_reading([_at_equal_cost(*pair, "flops_per_token") for pair in pairs.values()]),
    )


def _at_equal_cost(run: Run, other: Run, cost: str) -> float | None:
    """The difference of two runs' losses at the largest cost that both have paid; None where one is unknown.

    cost  of a step: milliseconds, by the median of each run, or operations per token, of which steps have equally many
    """
    ours, theirs = (one.median(cost) if "/" in cost else number(one.summary.get(cost)) for one in (run, other))
    if not ours or not theirs or not all(math.isfinite(result(one) or math.inf) for one in (run, other)):
        return None
    paid = min(ours * run.step, theirs * other.step)
    gap = loss_at(run, paid / ours) - loss_at(other, paid / theirs)
    return gap if math.isfinite(gap) else None


def loss_at(run: Run, step: float) -> float:
    """The validation loss after a number of steps, on a straight line between two evaluations."""
    steps, values = run.series(LOSS)
    return float(np.interp(step, steps, values)) if len(steps) else math.nan


def _reading(differences: Sequence[float | None]) -> Reading | None:
    complete = [difference for difference in differences if difference is not None]
    if len(complete) < 2 or len(complete) < len(differences):
        return None
    test = paired(complete)
    return Reading(float(test.mean), test.interval(ALPHA))


def difference_curves(comparison: Comparison) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The steps at which every pair was evaluated, and the differences of the validation losses (seeds, steps)."""
    curves: list[Series] = []
    for run, other in pairs_of(comparison.arm.runs, comparison.baseline.runs).values():
        curve = difference(run, other, LOSS)
        if len(curve.steps):
            curves.append(curve)
    steps = curves[0].steps if curves else np.zeros(0, np.int64)
    for curve in curves[1:]:
        steps = np.intersect1d(steps, curve.steps)
    values = [curve.values[np.isin(curve.steps, steps)] for curve in curves]
    return steps, np.array(values).reshape(len(curves), len(steps))


class SizeDifference(NamedTuple):
    """The differences of an arm to the baseline at a size, by seed, and the arm's operations of a run."""

    size: int | None
    operations: float
    differences: dict[int, float]


def differences_by_size(arena: Arena, arm: str) -> list[SizeDifference]:
    """The finite differences of the final losses at each size that has one."""
    plan, sizes = arena.plan, dict[int | None, SizeDifference]()
    runs = {(one.size, one.arm, one.seed): arena.runs.get(one.number) for one in plan.seed_runs()}
    for (size, name, seed), run in runs.items():
        other = runs[size, plan.baseline, seed]
        if name != arm or run is None or other is None:
            continue
        ours, theirs = result(run), result(other)
        flops, tokens = (number(run.summary.get(key)) for key in ("flops_per_token", "tokens"))
        if ours is None or theirs is None or not math.isfinite(ours + theirs) or not flops or not tokens:
            continue
        at_size = sizes.setdefault(size, SizeDifference(size, flops * tokens, {}))
        at_size.differences[seed] = ours - theirs
    return list(sizes.values())


def slope(sizes: Sequence[SizeDifference]) -> Paired | None:
    """The change of the difference with ten times the operations: a line for each seed, by least squares."""
    if len(sizes) < 2:
        return None
    seeds = sorted(set.intersection(*(set(one.differences) for one in sizes)))
    x = [math.log10(one.operations) for one in sizes]
    slopes = [np.polyfit(x, [one.differences[seed] for one in sizes], 1)[0] for seed in seeds]
    return paired(slopes) if len(slopes) > 1 else None


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
