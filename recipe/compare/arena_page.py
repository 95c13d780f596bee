"""The report of an arena: the page of every report, with the answer as a figure on its first screen, and as JSON.

In words: the headline, departures from the plan, warnings, and the command that continues.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.errors import first_few
from recipe.compare.arena_figures import arena_charts, forest
from recipe.compare.arena_results import Arena, ArmRuns, Comparison, Reading, compare_arms, race
from recipe.compare.arena_tables import (
    apart,
    cost_table,
    lr_table,
    plan_table,
    probe_table,
    race_table,
    size_table,
    verdict_table,
)
from recipe.compare.headline import Headline, notes_on
from recipe.compare.page import Report, Section, draw, sources_of, subtitle, write_page
from recipe.compare.runs import Run, RunSet
from recipe.compare.statistics import ALPHA, Verdict, outlier
from recipe.compare.sweeps import comparison_key
from recipe.compare.tables import run_table, runs_csv, signed
from recipe.files import to_json
from recipe.run.arms import LR
from recipe.run.plan import Plan
from recipe.wording import duration, listed, percent

RESULTS = "arena.json"
# The word between an arm and the baseline.
LINKS = {Verdict.better: " than", Verdict.worse: " than", Verdict.equivalent: " to", Verdict.undecided: " against"}


def write_arena_report(run_set: RunSet, plan: Plan, folder: Path, out: Path) -> Report:
    """Write index.html, arena.json, runs.csv and figures/ into `out`.

    folder  of the sweep, which the command that goes on names
    """
    arena = compare_arms(plan, run_set.runs)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    found, command = arena_headline(arena), go_on(arena, folder)
    run = run_set.runs[0]
    tables = (
        verdict_table(arena),
        size_table(arena),
        race_table(arena),
        cost_table(arena),
        probe_table(arena),
        lr_table(arena),
        plan_table(arena),
    )
    section = Section(
        "",
        f"{len(plan.arms)} arms, {run.option('model.name', 'model')} on {run.option('data.name', 'data')}",
        subtitle(run_set.runs),
        found,
        tuple(draw(chart, out) for chart in arena_charts(arena)),
        tuple(table for table in tables if table),
    )
    planned = {str(one.number): one for one in [*plan.lr_runs(), *plan.seed_runs()]}
    labels = {run.name: planned[run.name].arm if run.name in planned else "not in the plan" for run in run_set.runs}
    places = {
        run.name: f"optimizer.lr={planned[run.name].lr:g}"
        if run.name in planned and planned[run.name].stage == LR
        else ""
        for run in run_set.runs
    }
    report = Report(
        headline=found.text,
        tone=found.tone,
        outcome=None,
        lines=tuple((one.arm.name, f"{one.verdict.value}, {apart(one)}") for one in arena.comparisons),
        sections=(section,),
        notes=(*skewed(arena), *lr_warnings(arena), *departures(arena), *notes_on(run_set, [])),
        runs=run_table(run_set.runs, labels, places, "arm"),
        sources=sources_of(run_set.runs),
        method="arena_method.j2",
        lead=draw(forest(arena), out),
        commands=() if command is None else (command,),
    )
    csv = runs_csv(run_set.runs, labels, places, "arm")
    write_page(report, out, csv, margin=percent(plan.margin), looks=plan.planned_looks, alpha=percent(ALPHA))
    (out / RESULTS).write_text(to_json(as_json(arena), indent=2) + "\n", encoding="utf-8")
    return report


def as_json(arena: Arena) -> dict[str, Any]:
    """The results as plain values."""
    return {
        "baseline": arena.plan.baseline,
        "seeds": list(arena.plan.seeds),
        "margin": arena.plan.margin,
        "looks": [len(arena.plan.looks), arena.plan.planned_looks],
        "losses": {name: arm.losses for name, arm in arena.arms.items()},
        "learning_rates": {
            name: {"chosen": arm.lr, "tried": {f"{tried.lr:g}": tried.losses for tried in arm.tried}}
            for name, arm in arena.arms.items()
        },
        "arms": {comparison.arm.name: _comparison(comparison) for comparison in arena.comparisons},
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "verdict": comparison.verdict.value,
        "difference": comparison.test.mean if comparison.test else None,
        "deviation": comparison.test.deviation if comparison.test else None,
        "interval": comparison.test.interval(ALPHA) if comparison.test else None,
        "level": comparison.level,
        "interval_at_level": comparison.interval,
        "p": comparison.p,
        "p_sign_flip": comparison.p_sign_flip,
        "margin": comparison.margin,
        "differences": comparison.differences,
        "diverged": [seed for seed, difference in comparison.differences.items() if math.isinf(difference)],
        "missing": comparison.missing,
        "more_seeds": comparison.more,
        "parameters": comparison.arm.recorded("parameters"),
        "at_equal_time": _reading(comparison.time),
        "at_equal_flops": _reading(comparison.flops),
        "race": None if (times := race(comparison.arm, comparison.baseline)) is None else times._asdict(),
    }


def _reading(reading: Reading | None) -> dict[str, Any] | None:
    return None if reading is None else {"difference": reading.mean, "interval": reading.interval}


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
            f"Seeds were added {len(plan.looks) - 1} times, and the plan had {plan.planned_looks} looks "
            f"(arena.rules.looks), so false verdicts are no longer limited to {percent(ALPHA)}."
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
