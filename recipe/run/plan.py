"""The plan of an arena: its runs and the rules for its verdicts, written before the first run.

It is arena.json in the sweep's folder. Afterwards only the learning rates are filled in, and looks with more seeds are
appended; so the report can tell what departed from it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.atomic import write_atomically
from data.untrusted import UntrustedError, read_json
from recipe.errors import UserError
from recipe.run.arms import FIRST_LR_SEED, LR, LR_SEEDS, SEEDS, ArenaConfig, rate_at, size_overrides
from recipe.run.removed import as_today

FILE = "arena.json"
FORMAT = 1  # increase it when older plans would be misread


class PlanError(UserError, ValueError):
    """A plan that cannot be read or continued; the message says what to change."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of an arena.

    number  of its folder in the sweep's
    stage   lr or seeds
    size    layers; None in an arena without sizes
    """

    number: int
    stage: str
    arm: str
    seed: int
    lr: float | None
    size: int | None = None


@dataclass(frozen=True)
class Look:
    """A number of seeds at which the verdicts are read, and when it was planned."""

    seeds: int
    planned: str


@dataclass(frozen=True)
class Plan:
    """Everything that is fixed before the first run of an arena, and the looks and learning rates that come after.

    arms       the overrides of each arm, by its name
    baseline   the arm that the others are compared with
    common     the overrides of every arm
    arguments  the command line that started the sweep
    lr         the learning rates that each arm tries, at the first size, by its name; one: it is taken without a try
    looks      the first is planned at the start, the others when seeds were added
    chosen     the learning rate of each arm, once it is found
    sizes      the overrides at each number of layers, by the arm; empty: the model as composed
    """

    arms: dict[str, list[str]]
    baseline: str
    common: list[str]
    arguments: list[str]
    first_seed: int
    margin: float
    planned_looks: int
    lr: dict[str, list[float]]
    lr_seeds: int
    commit: str | None
    looks: list[Look]
    chosen: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        """The seeds of the latest look."""
        return range(self.first_seed, self.first_seed + self.looks[-1].seeds)

    @property
    def others(self) -> list[str]:
        """The arms that are compared with the baseline."""
        return [arm for arm in self.arms if arm != self.baseline]

    def lr_runs(self) -> list[PlannedRun]:
        """The runs that try learning rates; none for arms with one."""
        tried = [(arm, lr) for arm, rates in self.lr.items() if len(rates) > 1 for lr in rates]
        runs = enumerate(product(range(FIRST_LR_SEED, FIRST_LR_SEED + self.lr_seeds), tried))
        return [PlannedRun(n, LR, arm, seed, lr, self.layers[0]) for n, (seed, (arm, lr)) in runs]

    def seed_runs(self) -> list[PlannedRun]:
        """The runs on which the verdicts rest, seed by seed, so that an unfinished sweep has whole pairs."""
        runs = enumerate(product(self.seeds, self.layers, self.arms), len(self.lr_runs()))
        return [PlannedRun(n, SEEDS, arm, seed, self._rate(arm, size), size) for n, (seed, size, arm) in runs]

    @property
    def layers(self) -> list[int | None]:
        """The sizes; None for the model as composed."""
        return [int(size) for size in self.sizes] or [None]

    def _rate(self, arm: str, size: int | None) -> float | None:
        """The learning rate of an arm at a size."""
        lr, first = self.chosen.get(arm, self.lr[arm][0] if self.lr[arm] else None), self.layers[0]
        return lr if lr is None or size is None or first is None else rate_at(lr, first, size)

    def overrides(self, run: PlannedRun) -> list[list[str]]:
        """The overrides of a run, of which later ones replace earlier ones."""
        return [self.common, self.arms[run.arm], self.sizes[str(run.size)][run.arm] if run.size else []]


def new_plan(
    config: ArenaConfig,
    arms: dict[str, list[str]],
    common: list[str],
    arguments: list[str],
    composed: Mapping[str, DictConfig],
    commit: str | None,
) -> Plan:
    """The plan of an arena that starts now.

    composed  the configuration of each arm: the factors of arena.lr multiply its optimizer.lr
    """
    base_lr = {arm: float(cfg.optimizer.lr) for arm, cfg in composed.items()}
    factors = sorted(config.lr)
    if config.sizes:
        base_lr = {arm: rate_at(lr, composed[arm].model.n_layers, config.sizes[0]) for arm, lr in base_lr.items()}
        factors = factors or [1.0]  # the rate depends on the size
    return Plan(
        arms=arms,
        baseline=next(iter(arms)),
        common=common,
        arguments=arguments,
        first_seed=config.rules.first_seed,
        margin=config.rules.margin,
        planned_looks=config.rules.looks,
        lr={arm: [float(f"{factor * base_lr[arm]:.6g}") for factor in factors] for arm in arms},
        lr_seeds=LR_SEEDS,
        commit=commit,
        looks=[Look(config.seeds, datetime.now(UTC).isoformat(timespec="seconds"))],
        sizes={str(size): {arm: size_overrides(cfg, size) for arm, cfg in composed.items()} for size in config.sizes},
    )


def continued(plan: Plan, new: Plan, folder: Path) -> Plan:
    """The plan in `folder` where the command line asks for a `new` one: the same, or the same with more seeds.

    Raises PlanError where anything else differs.
    """
    for name in ("arms", "baseline", "common", "first_seed", "margin", "planned_looks", "lr", "lr_seeds", "sizes"):
        if (before := getattr(plan, name)) != (now := getattr(new, name)):
            raise PlanError(
                f"{folder / FILE} was written before the first run, and its {name.removeprefix('planned_')} is "
                f"{before} instead of {now}; repeat the sweep's overrides, or name another folder with hydra.sweep.dir."
            )
    before, now = plan.looks[-1].seeds, new.looks[-1].seeds
    if now < before:
        raise PlanError(
            f"arena.seeds={now} is fewer than the {before} that {folder / FILE} plans; set that many, or more to add "
            "some."
        )
    return plan if now == before else replace(plan, looks=[*plan.looks, new.looks[-1]])


def write_plan(plan: Plan, folder: Path) -> None:
    """Write arena.json, with its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FILE, json.dumps({"format": FORMAT, **asdict(plan)}, indent=2, ensure_ascii=False) + "\n")


def read_plan(folder: Path) -> Plan | None:
    """The plan in a sweep's folder; None where there is none. Raises PlanError for one that cannot be read."""
    path = folder / FILE
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, UntrustedError) as error:
        raise PlanError(f"{path} cannot be read ({error}); put the file back, or start anew.") from error
    recorded = content.get("format") if isinstance(content, dict) else None
    if recorded != FORMAT:
        raise PlanError(
            f"{path} has format {recorded}, and this version of the project reads format {FORMAT}; use the version "
            "that started the sweep, or start anew."
        )
    content = {name: content[name] for name in content.keys() & Plan.__annotations__.keys()}
    try:
        escaped = json.loads(json.dumps(content).replace("${", "\\\\${"))  # a reference in an override is text
        plan: Plan = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Plan), escaped))  # type: ignore[assignment]
        of_arms: list[Mapping[str, object]] = [plan.lr, *plan.sizes.values()]
        if not plan.looks or plan.baseline not in plan.arms or any(each.keys() != plan.arms.keys() for each in of_arms):
            raise ValueError("looks, or arms, are missing")
        if not all(map(str.isdecimal, plan.sizes)):
            raise ValueError("sizes are whole numbers")
    except (OmegaConfBaseException, ValueError) as error:
        raise PlanError(
            f"{path} is damaged ({str(error).splitlines()[0]}); put the file back, or start anew."
        ) from error
    return replace(plan, common=as_today(plan.common))
