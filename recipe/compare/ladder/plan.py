"""The plan of a ladder: ladder.json in the sweep's folder, written before the first run.

The prediction of the next size is added before that size is run, and never changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from recipe.compare.arena.plan import PlannedArms, check_same, damaged, read_content, write_content

FILE = "ladder.json"
FORMAT = 1  # increase it when older plans would be misread


@dataclass(frozen=True)
class LadderRun:
    """One run: the number of its folder, its arm, size and seed."""

    number: int
    arm: str
    depth: int
    seed: int


@dataclass(frozen=True)
class LadderPlan(PlannedArms):
    """Everything that is fixed before the first run of a ladder, and the prediction that comes before the last ones.

    depths     the sizes that are fitted; next: the one that is predicted
    sizes      the overrides that the rule makes, by arm and depth: "causal 2"
    predicted  the loss at the next size by arm: [loss, low, high, compute]; empty until the sizes before have run
    """

    seeds: int
    depths: list[int]
    next: int
    sizes: dict[str, list[str]]
    commit: str | None
    planned: str
    predicted: dict[str, list[float]]
    predicted_at: str | None = None

    def runs(self, depths: list[int]) -> list[LadderRun]:
        """The runs of these sizes, all of depths or all of next."""
        first = 0 if depths == self.depths else self.seeds * len(self.arms) * len(self.depths)
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        every = [(arm, depth, seed) for seed in seeds for depth in depths for arm in self.arms]
        return [LadderRun(first + n, *one) for n, one in enumerate(every)]

    def overrides(self, run: LadderRun) -> list[list[str]]:
        """The overrides of a run, of which later ones replace earlier ones."""
        return [self.common, self.arms[run.arm], self.sizes[f"{run.arm} {run.depth}"]]


def write_ladder(plan: LadderPlan, folder: Path) -> None:
    """Write ladder.json."""
    write_content(asdict(plan), FORMAT, folder / FILE)


def read_ladder(folder: Path) -> LadderPlan | None:
    """The plan in a sweep's folder; None where there is none. Raises PlanError for one that cannot be read."""
    path = folder / FILE
    content = read_content(path, FORMAT, get_type_hints(LadderPlan))
    if content is None:
        return None
    plan = LadderPlan(**content)
    wanted = {f"{arm} {depth}" for arm in plan.arms for depth in [*plan.depths, plan.next]}
    whole = not plan.predicted or plan.predicted.keys() == plan.arms.keys()
    for name, right in (
        ("baseline", plan.baseline in plan.arms),
        ("sizes", plan.sizes.keys() == wanted),
        ("seeds", plan.seeds > 0),
        ("predicted", whole and all(len(numbers) == 4 for numbers in plan.predicted.values())),
    ):
        if not right:
            raise damaged(path, name)
    return plan


def same_ladder(plan: LadderPlan, wanted: LadderPlan, folder: Path) -> LadderPlan:
    """The plan in `folder`, if it is the wanted one. Raises PlanError."""
    names: tuple[Any, ...] = ("arms", "baseline", "common", "first_seed", "seeds", "depths", "next", "sizes")
    check_same(plan, wanted, names, folder / FILE)
    return plan
