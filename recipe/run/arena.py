"""An arena: its arms are checked and its plan is made, then learning rates are tried, then the seeds are trained.

The plan is written before the first job. An arena that is started again in the same folder goes on where it stopped,
and one that is started with more seeds adds them.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe import CONF
from recipe.files import flatten, number, plain
from recipe.run.arms import LR, ArenaConfig, arena_mistakes, arm_mistakes, read_arms, size_overrides
from recipe.run.compose import by_key, checked, choices, formula_quoted, lines, quoted, refuse, to_config, unswept
from recipe.run.config import Config, ConfigError
from recipe.run.jobs import Job, SweepError, without
from recipe.run.plan import Plan, PlannedRun, continued, new_plan, read_plan, write_plan
from recipe.run.queue import Queue
from recipe.run.resume import check_defaults
from recipe.run.summary import git_state

# Overrides that a run of an arena gets from its plan, not from the command line.
PLANNED = ("resume", "seed")


def stray_options(config: Config) -> list[str]:
    """A sentence where options under `arena.*` are set and nothing would read them."""
    if config.arena == ArenaConfig() or config.arena.arm is not None:
        return []
    return ["arena.* has no effect on a single run or another sweep; add experiment=arena."]


def checked_plan(config: Config, overrides: list[str], of_run: Callable[[Config], Iterable[str]]) -> Plan:
    """The plan that the command line asks for.

    config  that the overrides of the command line compose
    of_run  the mistakes in the configuration of a run

    Raises ConfigError for mistakes in the options of the arena, its arms, and the configuration of each arm.
    """
    arena, single = config.arena, unswept(overrides)
    sentences = [
        f"{line} is more than one value, and the runs of an arena share one; give each an arm (arena.arms)."
        for line in overrides
        if line not in single
    ]
    if "seed" in by_key(overrides):
        sentences.append(
            f"an arena pairs its runs by seed; instead of seed=, set arena.seeds={arena.seeds}, which counts from "
            f"arena.rules.first_seed={arena.rules.first_seed}."
        )
    try:
        arms = read_arms(arena.arms or "", sorted(choices()["arm"]))
    except ValueError as error:
        raise ConfigError("\n".join([*sentences, str(error)])) from error
    arms = {name: [formula_quoted(line) for line in its] for name, its in arms.items()}
    sentences += arena_mistakes(arena, list(arms))
    if arena.sizes and config.training.batch_tokens is not None:
        sentences.append(
            f"training.batch_tokens={config.training.batch_tokens} would be replaced, as a step of an arena with sizes "
            "has training.batch_size sequences for each layer; leave it out."
        )
    refuse(sentences)
    common = [line for line in without(overrides, PLANNED) if not line.lstrip("+").startswith(("arena.", "hydra"))]
    composed, wrong, settings = dict[str, DictConfig](), dict[str, list[str]](), dict[str, dict[str, Any]]()
    for name, own_lines in arms.items():
        try:
            composed[name] = checked(merged(common, own_lines))
            at_size = size_overrides(composed[name], arena.sizes[-1]) if arena.sizes else []
            of_arm = to_config(checked(merged(common, own_lines, at_size)))
            wrong[name] = list(of_run(of_arm))
            settings[name] = flatten(plain(of_arm))
        except ConfigError as error:
            wrong[name] = [str(error)]
        wrong[name] += [
            f"{line} is set by the plan of the sweep; leave it out."
            for line in own_lines
            if not without([line], PLANNED)
        ]
    for name, mistakes in wrong.items():
        for sentence in mistakes:
            everywhere = all(sentence in others for others in wrong.values())
            sentences.append(sentence if everywhere else f"arm {name}: {sentence}")
    refuse(sentences)
    refuse(list(arm_mistakes(settings)))
    return new_plan(arena, arms, common, sys.argv[1:], composed, git_state(CONF.parent)["commit"])


def merged(*lists: Sequence[str]) -> list[str]:
    """Overrides by key, of which a later one replaces an earlier one."""
    return lines(by_key([line for lines in lists for line in lines]))


def run_arena(plan: Plan, queue: Queue, train: Any) -> None:
    """Run what has no result yet in the sweep's folder, of this plan or of the one there with more seeds. Raises
    PlanError, SweepError."""
    folder = queue.folder
    earlier = read_plan(folder)
    plan = plan if earlier is None else continued(earlier, plan, folder)
    write_plan(plan, folder)
    if not plan.chosen:
        queue.run([job_of(plan, run, folder) for run in plan.lr_runs()], train, ahead=len(plan.seed_runs()))
        plan = replace(plan, chosen=choose(plan, folder))
        write_plan(plan, folder)
    jobs = [job_of(plan, run, folder) for run in plan.seed_runs()]
    check_defaults(jobs)
    queue.run(jobs, train)


def job_of(plan: Plan, run: PlannedRun, folder: Path) -> Job:
    """The job of a planned run."""
    planned = [f"seed={run.seed}", f"arena.arm={quoted(run.arm)}"]
    planned += [] if run.lr is None else [f"optimizer.lr={run.lr!r}"]
    size = f", {run.size} layers" if run.size else ""
    rate = f", optimizer.lr={run.lr:g}" if run.stage == LR else ""
    return Job(
        run.number,
        tuple(merged(*plan.overrides(run), planned)),
        folder / str(run.number),
        may_diverge=True,
        name=f"{run.arm}{size}, seed {run.seed}{rate}",
    )


def choose(plan: Plan, folder: Path) -> dict[str, float]:
    """The learning rate of each arm: the one with the lowest mean loss over the seeds of the sweep.

    A run that diverged or ran out of memory counts as an infinite loss. Raises SweepError where a run has no result.
    """
    losses: dict[tuple[str, float], list[float]] = {}
    for run in plan.lr_runs():
        job = job_of(plan, run, folder)
        if not job.done:
            raise SweepError(f"{job.folder} has no result, so no learning rate can be chosen; start the sweep again.")
        assert run.lr is not None
        summary = job.summary()
        loss = number(summary.get("val_loss")) if summary.get("status") == "completed" else None
        losses.setdefault((run.arm, run.lr), []).append(math.inf if loss is None else loss)
    means = sorted((statistics.fmean(of_seeds), lr, arm) for (arm, lr), of_seeds in losses.items())
    chosen = {arm: rates[0] for arm, rates in plan.lr.items() if rates}
    return chosen | {arm: lr for _, lr, arm in reversed(means)}  # where all diverge, the lowest
