"""Numbers from the runs of a ladder: the sizes of each arm, the law through them, differences to the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from recipe.compare.arena.results import result
from recipe.compare.arena.statistics import Paired, paired
from recipe.compare.ladder.fit import Law, fit_law
from recipe.compare.ladder.plan import LadderPlan
from recipe.compare.runs import Run
from recipe.files import number


@dataclass(frozen=True)
class Size:
    """The runs of an arm at a depth that have a finite loss: their losses by seed, and the compute of one."""

    depth: int
    compute: float
    parameters: float | None
    losses: Mapping[int, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.losses.values())))


@dataclass(frozen=True)
class Rung:
    """An arm: its sizes, the law through the fitted ones, the prediction and the measurement."""

    name: str
    sizes: tuple[Size, ...]
    law: Law | None
    predicted: tuple[float, float, float, float] | None
    measured: Size | None

    @property
    def inside(self) -> bool | None:
        """Whether the measured loss lies in the predicted interval."""
        return None if not (self.predicted and self.measured) else self._low <= self.measured.mean <= self._high

    @property
    def _low(self) -> float:
        return self.predicted[1] if self.predicted else math.nan

    @property
    def _high(self) -> float:
        return self.predicted[2] if self.predicted else math.nan


def rungs_of(plan: LadderPlan, runs: Sequence[Run]) -> dict[str, Rung]:
    """The arms of a ladder, from the runs in its folder, whose names are the numbers of the plan."""
    known = {int(run.name): run for run in runs if run.name.isdigit()}
    return {arm: _rung(plan, arm, known) for arm in plan.arms}


def _rung(plan: LadderPlan, arm: str, runs: Mapping[int, Run]) -> Rung:
    def sizes(depths: list[int]) -> list[Size]:
        measured = []
        for depth in depths:
            planned = [run for run in plan.runs(depths) if (run.arm, run.depth) == (arm, depth) and run.number in runs]
            losses = {one.seed: (runs[one.number], result(runs[one.number])) for one in planned}
            finite = {seed: (run, loss) for seed, (run, loss) in losses.items() if loss is not None and loss < math.inf}
            costs = [compute for run, _ in finite.values() if (compute := _compute(run))]
            if costs:
                parameters = number(next(iter(finite.values()))[0].summary.get("parameters"))
                measured.append(Size(depth, costs[0], parameters, {seed: loss for seed, (_, loss) in finite.items()}))
        return measured

    fitted, last = sizes(plan.depths), sizes([plan.next])
    whole = len(fitted) == len(plan.depths)
    law = fit_law([size.compute for size in fitted], [size.mean for size in fitted]) if whole else None
    predicted = tuple(plan.predicted[arm]) if arm in plan.predicted else None
    measured = next((size for size in last if len(size.losses) == plan.seeds), None)
    return Rung(arm, tuple(fitted), law, predicted, measured)  # type: ignore[arg-type]


def _compute(run: Run) -> float | None:
    """The operations of a run."""
    flops, tokens = (number(run.summary.get(name)) for name in ("flops_per_token", "tokens"))
    return flops * tokens if flops and tokens else None


def differences(arm: Rung, baseline: Rung) -> list[tuple[Size, Paired]]:
    """The paired differences to the baseline at each size that has two or more pairs."""
    tests = []
    for ours, theirs in _pairs(arm, baseline):
        gaps = [loss - theirs.losses[seed] for seed, loss in ours.losses.items() if seed in theirs.losses]
        if len(gaps) > 1:
            tests.append((ours, paired(gaps)))
    return tests


def slope(arm: Rung, baseline: Rung) -> Paired | None:
    """The change of the difference with ten times the compute: a line for each seed, by least squares."""
    pairs = _pairs(arm, baseline)
    if len(pairs) < 2:
        return None
    shared = set.intersection(*(set(size.losses) for pair in pairs for size in pair))
    x = [math.log10(ours.compute) for ours, _ in pairs]
    slopes = [stats.linregress(x, [o.losses[seed] - t.losses[seed] for o, t in pairs]).slope for seed in sorted(shared)]
    return paired(slopes) if len(slopes) > 1 else None


def _pairs(arm: Rung, baseline: Rung) -> list[tuple[Size, Size]]:
    of = {size.depth: size for size in (*baseline.sizes, *([baseline.measured] if baseline.measured else []))}
    sizes = (*arm.sizes, *([arm.measured] if arm.measured else []))
    return [(size, of[size.depth]) for size in sizes if size.depth in of]
