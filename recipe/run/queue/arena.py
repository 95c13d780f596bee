"""An arena as a Hydra sweeper: learning rates first, then the seeds, each stage launched as the jobs of a sweep.

The plan is written before the first job. A sweep that is started again in the same folder goes on where it stopped, and
one that is started with more seeds adds them.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from recipe.files import number
from recipe.run.arms import ArenaConfig, read_arms
from recipe.run.queue.jobs import Job, SweepError, without
from recipe.run.queue.launcher import quoted
from recipe.run.queue.plan import Plan, PlannedRun, continued, new_plan, read_plan, write_plan
from recipe.run.summary import git_state

ROOT = Path(__file__).parents[3]
ARMS = ROOT / "conf" / "arm"
# Overrides that a run of an arena gets from its plan, not from the command line.
PLANNED = ("resume", "seed")


def register() -> None:
    """Make the sweeper of conf/hydra/sweeper/arena.yaml known to Hydra in this process."""
    Plugins.instance().register(ArenaSweeper)


def arms_of(config: ArenaConfig) -> dict[str, list[str]]:
    """The overrides of each arm, by its name. Raises ValueError with a sentence."""
    return read_arms(config.arms or "", sorted(file.stem for file in ARMS.glob("*.yaml")))


def common_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides of every run: the command line's, without the ones that the plan sets."""
    return [line for line in without(arguments, PLANNED) if not line.lstrip("+").startswith("arena.")]


def merged(*lists: Sequence[str]) -> list[str]:
    """Overrides by key, of which a later one replaces an earlier one."""
    parser = OverridesParser.create()
    return list({parser.parse_override(line).key_or_group: line for lines in lists for line in lines}.values())


def job_overrides(plan: Plan, run: PlannedRun) -> list[str]:
    """The overrides of a planned run."""
    planned = [f"seed={run.seed}", f"arena.arm={quoted(run.arm)}", f"arena.stage={run.stage}"]
    planned += [] if run.lr is None else [f"optimizer.lr={run.lr!r}"]
    planned += [] if run.size is None else [f"arena.size={run.size}"]
    return merged(*plan.overrides(run), planned)


class ArenaSweeper(Sweeper):
    """Runs an arena; its options are those of ArenaConfig."""

    __module__ = "hydra_plugins.sweeps"  # Hydra takes sweepers from this package only

    def __init__(self, params: None = None) -> None:
        """
        params  an option of Hydra's default sweeper, which Hydra reads from every sweeper
        """

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.loader, self.settings = hydra_context.config_loader, config
        self.command_line = sys.argv[1:]
        launcher = {"hydra_context": hydra_context, "task_function": task_function, "config": config}
        self.jobs: Any = Plugins.instance().instantiate_launcher(**launcher)

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Launch the runs of the plan that have no result yet in the sweep's folder. Raises PlanError, SweepError."""
        folder = Path(self.settings.hydra.sweep.dir)
        plan, earlier = self.plan(arguments), read_plan(folder)
        plan = plan if earlier is None else continued(earlier, plan, folder)
        write_plan(plan, folder)
        OmegaConf.save(self.settings, folder / "multirun.yaml")
        returned = []
        if not plan.chosen:
            returned.append(self.launch(plan, plan.lr_runs(), ahead=len(plan.seed_runs())))
            plan = replace(plan, chosen=choose(plan, folder))
            write_plan(plan, folder)
        returned.append(self.launch(plan, plan.seed_runs(), ahead=0))
        return returned

    def plan(self, arguments: Sequence[str]) -> Plan:
        """The plan that the command line asks for."""
        arena: ArenaConfig = OmegaConf.to_object(self.settings.arena)  # type: ignore[assignment]
        arms, common = arms_of(arena), common_overrides(arguments)
        composed = {
            name: self.loader.load_sweep_config(self.settings, merged(common, overrides))
            for name, overrides in arms.items()
        }
        return new_plan(arena, arms, common, self.command_line, composed, git_state(ROOT)["commit"])

    def launch(self, plan: Plan, runs: Sequence[PlannedRun], ahead: int) -> Sequence[JobReturn]:
        """Run the jobs of a stage. Exits where one failed or a signal came.

        ahead  jobs of the next stage
        """
        if not runs:
            return []
        self.jobs.ahead = ahead  # which the process launcher shows
        return self.jobs.launch([job_overrides(plan, run) for run in runs], initial_job_idx=runs[0].number)


def choose(plan: Plan, folder: Path) -> dict[str, float]:
    """The learning rate of each arm: the one with the lowest mean loss over the seeds of the sweep.

    A run that diverged or ran out of memory counts as an infinite loss. Raises SweepError where a run has no result.
    """
    losses: dict[tuple[str, float], list[float]] = {}
    for run in plan.lr_runs():
        job = Job(run.number, (), folder / str(run.number), may_diverge=True)
        if not job.done:
            raise SweepError(f"{job.folder} has no result, so no learning rate can be chosen; start the sweep again.")
        assert run.lr is not None
        losses.setdefault((run.arm, run.lr), []).append(final_loss(job.summary()))
    chosen = {}
    for arm, rates in plan.lr.items():
        means = {lr: statistics.fmean(losses.get((arm, lr), [0.0])) for lr in rates}
        if rates:
            chosen[arm] = min(means, key=lambda lr: (means[lr], lr))  # where all diverge, the lowest
    return chosen


def final_loss(summary: dict[str, Any]) -> float:
    """The validation loss at the end of a run; infinite where it did not come to its end with one."""
    loss = number(summary.get("val_loss"))
    return math.inf if loss is None or summary.get("status") != "completed" else loss
