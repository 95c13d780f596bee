"""Numbers from the runs of an arena: differences to the baseline, verdicts, readings at equal cost, sizes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from recipe.compare.costs import median_of
from recipe.compare.runs import Run
from recipe.compare.statistics import (
    ALPHA,
    Paired,
    Verdict,
    holm_levels,
    judge,
    paired,
    paired_if_several,
    seeds_to_decide,
    sign_flip,
    signed_rank,
)
from recipe.compare.sweeps import by_seed, equal_to_the_bit, pairs_of
from recipe.run.plan import Plan

LOSS = "val/loss"
SOLVED = 0.01  # of wrong answers


@dataclass(frozen=True)
class ArmRuns:
    """The runs of an arm on the seeds of the plan, and the runs that tried learning rates.

    losses  of each seed: its final validation loss or share of wrong answers, infinite where it diverged. Runs without
            a result are left out.
    tried   the losses of each learning rate over the seeds of the sweep, infinite where one diverged
    """

    name: str
    runs: Mapping[int, Run]
    losses: Mapping[int, float]
    tried: Mapping[float, Sequence[float]]
    lr: float | None

    @property
    def loss(self) -> float | None:
        """The mean over the seeds that have a finite loss."""
        finite = [loss for loss in self.losses.values() if math.isfinite(loss)]
        return statistics.fmean(finite) if finite else None


@dataclass(frozen=True)
class Comparison:
    """One arm against the baseline.

    seeds   of the plan
    margin  in loss
    level   the level that Holm's correction and the planned looks leave to this arm
    """

    arm: ArmRuns
    baseline: ArmRuns
    seeds: Sequence[int]
    margin: float
    level: float = ALPHA

    @cached_property
    def differences(self) -> dict[int, float]:
        """Of the final losses, by seed: 0 where both diverged, infinite where one did."""
        theirs = self.baseline.losses
        return {
            seed: 0.0 if loss == theirs[seed] else loss - theirs[seed]
            for seed, loss in self.arm.losses.items()
            if seed in theirs
        }

    @property
    def missing(self) -> tuple[int, ...]:
        """The seeds that lack the arm's result or the baseline's."""
        return tuple(seed for seed in self.seeds if seed not in self.differences)

    @property
    def diverged(self) -> list[int]:
        """The seeds in which the arm diverged, or the baseline."""
        return [seed for seed, difference in self.differences.items() if not math.isfinite(difference)]

    @cached_property
    def test(self) -> Paired | None:
        """Of the finite differences; None with fewer than two."""
        return paired_if_several([gap for gap in self.differences.values() if math.isfinite(gap)])

    @cached_property
    def p(self) -> float:
        """Of the paired t-test, and of the signed-rank test where a run diverged; 1 while runs of the plan are
        missing."""
        if self.missing:
            return 1.0
        values = list(self.differences.values())
        return signed_rank(values) if self.diverged else float(paired(values).p)

    @property
    def p_sign_flip(self) -> float | None:
        """None where a run diverged."""
        return sign_flip(list(self.differences.values())) if self.test and not self.diverged else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """At the arm's level; the verdict follows from it."""
        return self.test.interval(self.level) if self.test else None

    @cached_property
    def verdict(self) -> Verdict:
        if self.missing or (self.diverged and self.p > self.level):
            return Verdict.undecided
        if self.diverged:  # an infinite difference has no mean: its rank decides
            return Verdict.worse if np.sign(list(self.differences.values())).sum() > 0 else Verdict.better
        return judge(self.interval, self.margin) if self.interval else Verdict.undecided

    @cached_property
    def more(self) -> int | None:
        """Seeds to add so that the verdict is decided; None where it is, or where no number would do."""
        if self.verdict is not Verdict.undecided or self.missing or self.diverged or not self.test:
            return None
        needed = seeds_to_decide(self.test, self.margin, self.level)
        return None if needed is None else needed - self.test.n

    @cached_property
    def equal(self) -> bool:
        """Whether every run logged the losses of its partner, bit for bit."""
        return equal_to_the_bit(pairs_of(self.arm.runs, self.baseline.runs))

    def at_equal(self, cost: str) -> Paired | None:
        """The differences where arm and baseline have paid as much; None where that is unknown.

        cost  of a step: throughput/step_ms, or flops_per_token, of which steps have equally many
        """
        gaps = [_at_equal(cost, *pair) for pair in pairs_of(self.arm.runs, self.baseline.runs).values()]
        return None if None in gaps else paired_if_several([gap for gap in gaps if gap is not None])


def _at_equal(cost: str, run: Run, other: Run) -> float | None:
    """The difference of two runs' losses at the largest cost that both have paid; None where one is unknown."""
    ours, theirs = run.median(cost), other.median(cost)
    if not ours or not theirs or math.inf in (result(run), result(other)):
        return None
    paid = min(ours * run.step, theirs * other.step)
    gap = loss_at(run, paid / ours) - loss_at(other, paid / theirs)
    return gap if math.isfinite(gap) else None


def loss_at(run: Run, step: float) -> float:
    """The validation loss after a number of steps, on a straight line between two evaluations."""
    steps, values = run.series(LOSS)
    return float(np.interp(step, steps, values)) if len(steps) else math.nan


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


def compare_arms(plan: Plan, runs: Sequence[Run]) -> Arena:
    """The comparisons of a plan's arms with its baseline.

    runs  in the sweep's folder; their names are the numbers of the plan. Others than the planned ones do not count
    """
    planned = {str(one.number): one for one in [*plan.lr_runs(), *plan.seed_runs()]}
    data = {str(run.option("data.name")) for run in runs}
    task = data.pop() if len(data) == 1 else None  # if it has a probe, which measured the share of right answers
    task = task if any(f"probe/{task}" in run.metrics for run in runs) else None
    by_number = {
        int(run.name): run
        for run in runs
        if (one := planned.get(run.name)) and (run.seed, run.option("arena.arm", one.arm)) == (one.seed, one.arm)
    }
    arms = {arm: _arm_runs(plan, arm, by_number, task, plan.layers[-1]) for arm in plan.arms}
    baseline = arms[plan.baseline]
    margin = plan.margin * (1.0 if task else baseline.loss or 0.0)  # of all answers, or of the loss
    found = [Comparison(arms[arm], baseline, plan.seeds, margin) for arm in plan.others]
    levels = holm_levels([one.p for one in found], ALPHA / plan.planned_looks)
    comparisons = tuple(replace(one, level=level) for one, level in zip(found, levels, strict=True))
    return Arena(plan, arms, comparisons, by_number, task)


def _arm_runs(plan: Plan, arm: str, runs: Mapping[int, Run], task: str | None, size: int | None) -> ArmRuns:
    seeds = [one for one in plan.seed_runs() if one.arm == arm and one.size == size]
    losses: dict[float, list[float]] = {lr: [] for lr in plan.lr[arm]} if len(plan.lr[arm]) > 1 else {}
    for one in plan.lr_runs():
        if one.arm == arm and (run := runs.get(one.number)):
            loss = math.inf if run.out_of_memory else result(run, task)
            if one.lr is not None and loss is not None:
                losses[one.lr].append(loss)
    trained = by_seed(runs[one.number] for one in seeds if one.number in runs)
    results = {seed: loss for seed, run in trained.items() if (loss := result(run, task)) is not None}
    return ArmRuns(arm, trained, results, losses, seeds[0].lr)


class SizeDifference(NamedTuple):
    """The differences of an arm to the baseline at a size, by seed, and the arm's operations of a run."""

    size: int | None
    operations: float
    differences: dict[int, float]


def differences_by_size(arena: Arena, arm: str) -> list[SizeDifference]:
    """The finite differences of the final losses at each size that has one."""
    plan, sizes = arena.plan, list[SizeDifference]()
    for size in plan.layers:
        ours, theirs = (_arm_runs(plan, name, arena.runs, None, size) for name in (arm, plan.baseline))
        gaps = Comparison(ours, theirs, plan.seeds, 0.0).differences
        gaps = {seed: gap for seed, gap in gaps.items() if math.isfinite(ours.losses[seed] + gap)}
        costs = (median_of(run.median(of) for run in ours.runs.values()) for of in ("flops_per_token", "tokens"))
        if gaps and (operations := math.prod(cost or 0.0 for cost in costs)):
            sizes.append(SizeDifference(size, operations, gaps))
    return sizes


def slope(sizes: Sequence[SizeDifference]) -> Paired | None:
    """The change of the difference with ten times the operations: a line for each seed, by least squares."""
    if len(sizes) < 2:
        return None
    seeds = sorted(set.intersection(*(set(one.differences) for one in sizes)))
    x = [math.log10(one.operations) for one in sizes]
    return paired_if_several([np.polyfit(x, [one.differences[seed] for one in sizes], 1)[0] for seed in seeds])


class Race(NamedTuple):
    """How an arm reaches the baseline's final loss at the same seed.

    reached  seeds that do, of `pairs`
    less     the baseline's tokens over the arm's, and its seconds of training over the arm's: geometric means. None
             unless all seeds reach the loss, as the others would have cost more
    """

    reached: int
    pairs: int
    less: tuple[float, float] | None


def race(arm: ArmRuns, baseline: ArmRuns) -> Race:
    """The cost with which an arm reaches the baseline's final loss, of the pairs whose steps' times are known."""
    ratios, pairs = [], pairs_of(arm.runs, baseline.runs)
    for run, other in pairs.values():
        target, (ours, theirs) = result(other), (one.median("throughput/step_ms") for one in (run, other))
        step = None if target is None else step_to(run, target)
        if step and ours and theirs:
            ratios.append((other.step / step, other.step * theirs / (step * ours)))
    less = None
    if ratios and len(ratios) == len(pairs):
        fewer, faster = map(statistics.geometric_mean, zip(*ratios, strict=True))
        less = fewer, faster
    return Race(len(ratios), len(pairs), less)


def step_to(run: Run, target: float) -> float | None:
    """The first step with a validation loss of at most the target, on straight lines between two evaluations."""
    steps, values = run.series(LOSS)
    below = np.flatnonzero(values <= target)
    if not len(below):
        return None
    around = slice(max(0, below[0] - 1), below[0] + 1)
    return float(np.interp(target, values[around][::-1], steps[around][::-1]))
