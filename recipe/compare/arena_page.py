"""The report of an arena: the page of every report, with the answer as a figure on its first screen, and as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from recipe.compare.arena_figures import arena_charts, forest
from recipe.compare.arena_notes import arena_headline, departures, go_on, lr_warnings, skewed
from recipe.compare.arena_results import Arena, Comparison, Reading, compare_arms, race
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
from recipe.compare.notes import notes_on
from recipe.compare.page import Report, Section, draw, sources_of, subtitle, write_page
from recipe.compare.runs import RunSet
from recipe.compare.statistics import ALPHA
from recipe.compare.tables import run_table, runs_csv
from recipe.files import to_json
from recipe.run.arms import LR
from recipe.run.plan import Plan
from recipe.wording import percent

RESULTS = "arena.json"


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
