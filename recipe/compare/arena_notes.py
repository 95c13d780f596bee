"""An arena in words: its headline, departures from the plan, warnings, and the command that continues."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from data.errors import first_few
from recipe.compare.arena_results import Arena, ArmRuns
from recipe.compare.headline import Headline
from recipe.compare.runs import Run
from recipe.compare.statistics import ALPHA, Verdict, outlier
from recipe.compare.sweeps import comparison_key
from recipe.compare.tables import signed
from recipe.wording import duration, listed, percent

# The word between an arm and the baseline.
LINKS = {Verdict.better: " than", Verdict.worse: " than", Verdict.equivalent: " to", Verdict.undecided: " against"}


def arena_headline(arena: Arena) -> Headline:
    """The verdicts in a sentence."""
    clauses: list[str] = []
    for verdict, link in LINKS.items():
        names = [comparison.arm.name for comparison in arena.comparisons if comparison.verdict is verdict]
        if names:
            baseline = "" if clauses else f"{link} {arena.plan.baseline}"
            clauses.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {verdict.value}{baseline}")
    decided = any(comparison.verdict is not Verdict.undecided for comparison in arena.comparisons)
    solved = [arm.name for arm in arena.arms.values() if arena.solved(arm)]
    if len(solved) == len(arena.arms):
        clauses = [f"{'both' if len(solved) == 2 else 'all arms'} solve {arena.task}"]
    return Headline(f"{'; '.join(clauses)} ({len(arena.plan.seeds)} seeds)", "none" if decided else "open")


def skewed(arena: Arena) -> list[str]:
    """A warning for each arm with a seed that ends far from the others, which its interval does not expect."""
    lines = []
    for comparison in arena.comparisons:
        gaps = {seed: gap for seed, gap in comparison.differences.items() if math.isfinite(gap)}
        far = outlier(list(gaps.values()))
        if far is not None:
            seed, gap = list(gaps.items())[far]
            lines.append(
                f"{comparison.arm.name} differs with seed {seed} by {signed(gap)}, far from its other seeds: the "
                f"intervals assume no rare large deviations, so more than {percent(ALPHA)} of such verdicts may be "
                "false. Add seeds, and read p (signs)."
            )
    return lines


def departures(arena: Arena) -> list[str]:
    """Departures from the plan, a sentence each."""
    plan, lines = arena.plan, []
    if len(plan.looks) > plan.planned_looks:
        lines.append(
            f"Seeds were added {len(plan.looks) - 1} times, and the plan had {plan.planned_looks} looks (arena.looks), "
            f"so false verdicts are no longer limited to {percent(ALPHA)}."
        )
    planned = {run.number: run for run in [*plan.lr_runs(), *plan.seed_runs()]}
    absent = [str(number) for number in planned if number not in arena.runs]
    if absent:
        lines.append(f"{len(absent)} of {len(planned)} planned runs have no folder ({first_few(absent)}).")
    failed = [run for number, run in arena.runs.items() if number in planned and _without_result(run)]
    for run in failed:
        reason = f": {run.summary['message']}".rstrip(" .") if run.summary.get("message") else ""
        lines.append(f"{run.called} ({planned[int(run.name)].arm}) has no result ({run.status}{reason}).")
    if extra := [str(number) for number in arena.runs if number not in planned]:
        lines.append(f"Runs that are not in the plan were left out: {first_few(extra)}.")
    for number, run in arena.runs.items():
        one = planned.get(number)
        if one is None:
            continue
        expected = {"seed": one.seed, "arena.arm": one.arm} | ({} if one.lr is None else {"optimizer.lr": one.lr})
        wrong = {name: value for name, value in expected.items() if run.option(name, value) != value}
        lines += [
            f"{run.called} has {name}={run.option(name)}; the plan says {value}." for name, value in wrong.items()
        ]
    for arm in arena.arms.values():
        keys = [_settings(run) for run in arm.runs.values()]
        differing = sorted({name for key in keys for name in key if key[name] != keys[0].get(name)})
        if differing:
            lines.append(
                f"The runs of {arm.name} are not all the same configuration: they differ in {listed(differing)}."
            )
    return lines


def _without_result(run: Run) -> bool:
    return run.status != "completed" and not run.out_of_memory and run.diverged() is None


def _settings(run: Run) -> dict[str, str]:
    return {name: value for name, value in comparison_key(run).items() if "${" not in value}


def lr_warnings(arena: Arena) -> list[str]:
    """A sentence for each arm whose best learning rate is the lowest or the highest that was tried."""
    edges: dict[str, list[ArmRuns]] = {}
    for arm in arena.arms.values():
        if arm.lr_at_edge:
            edges.setdefault("lowest" if arm.lr == arm.tried[0].lr else "highest", []).append(arm)
    return [
        f"The best learning rate of {listed([arm.name for arm in arms])} is the {edge} that was tried: a wider sweep "
        "(arena.lr) may find a better one."
        for edge, arms in edges.items()
    ]


def go_on(arena: Arena, folder: Path) -> tuple[str, str] | None:
    """The next step and its command: the runs that are missing, or the seeds that would decide; else None."""
    plan = arena.plan
    again = [line for line in plan.arguments if not line.startswith(("hydra.sweep.dir=", "arena.seeds=", "resume="))]
    if any(comparison.missing for comparison in arena.comparisons):
        seeds = len(plan.seeds)
        return "Run the missing runs", _command(again, f"arena.seeds={seeds}", f"hydra.sweep.dir={folder}")
    more = max((comparison.more or 0 for comparison in arena.comparisons), default=0)
    if not more:
        return None
    total = len(plan.seeds) + more
    if len(plan.looks) < plan.planned_looks:
        added = _command(again, f"arena.seeds={total}", f"hydra.sweep.dir={folder}")
        return f"Add {more} seeds{_time(arena, more)}", added
    again = [line for line in again if not line.startswith(("arena.first_seed=", "arena.looks=", "arena.rules."))]
    took = _time(arena, total)
    fresh = _command(again, f"arena.seeds={total}", f"arena.rules.first_seed={plan.seeds.stop}", "arena.rules.looks=1")
    return f"The planned looks are used up; start anew with {total} other seeds{took}, looked at once", fresh


def _time(arena: Arena, seeds: int) -> str:
    """How long all arms take with some seeds, one run after another; empty where no run recorded its time."""
    taken = [arm.recorded("wall_time_s") for arm in arena.arms.values()]
    seconds = [one for one in taken if one is not None]
    if len(seconds) < len(taken):
        return ""
    return f" (about {duration(seeds * sum(seconds))} of runs, one after another)"


def _command(*parts: str | Sequence[str]) -> str:
    words = [word for part in parts for word in ([part] if isinstance(part, str) else part)]
    return f"python train.py {shlex.join(words)}"
