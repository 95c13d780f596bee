"""The report of an arena: the page of every report, with the answer as a figure on its first screen, and as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from recipe.arena.config import LR
from recipe.arena.plan import Plan
from recipe.arena.statistics import ALPHA
from recipe.files import to_json
from recipe.report.arena.figures import arena_charts, forest
from recipe.report.arena.results import Arena, Comparison, Reading, compare_arms
from recipe.report.arena.tables import cost_table, lr_table, plan_table, probe_table, verdict_table
from recipe.report.arena.text import arena_answer, departures, go_on, lr_warnings
from recipe.report.page import Report, Section, draw, sources_of, subtitle, write_page
from recipe.report.runs import RunSet
from recipe.report.tables import run_table, runs_csv
from recipe.report.text import notes_on
from recipe.wording import percent

RESULTS = "arena.json"


def write_arena_report(found: RunSet, plan: Plan, folder: Path, out: Path) -> Report:
    """Write index.html, report.md, arena.json, runs.csv and figures/ into `out`.

    folder  of the sweep, which the command that goes on names
    """
    arena = compare_arms(plan, found.runs)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    answer, command = arena_answer(arena), go_on(arena, folder)
    run = found.runs[0]
    tables = verdict_table(arena), cost_table(arena), probe_table(arena), lr_table(arena), plan_table(arena)
    section = Section(
        "",
        f"{len(plan.arms)} arms, {run.option('model.name', 'model')} on {run.option('data.name', 'data')}",
        subtitle(found.runs),
        answer,
        tuple(draw(chart, out) for chart in arena_charts(arena)),
        tuple(table for table in tables if table),
    )
    planned = {str(one.number): one for one in [*plan.lr_runs(), *plan.seed_runs()]}
    labels = {run.name: planned[run.name].arm if run.name in planned else "not in the plan" for run in found.runs}
    places = {
        run.name: f"optimizer.lr={planned[run.name].lr:g}"
        if run.name in planned and planned[run.name].stage == LR
        else ""
        for run in found.runs
    }
    report = Report(
        headline=answer.headline,
        tone=answer.tone,
        outcome=None,
        sections=(section,),
        notes=(*lr_warnings(arena), *departures(arena), *notes_on(found, [])),
        runs=run_table(found.runs, labels, places, "arm"),
        sources=sources_of(found.runs),
        method="arena_method.j2",
        lead=draw(forest(arena), out),
        commands=() if command is None else (command,),
    )
    csv = runs_csv(found.runs, labels, places, "arm")
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
        "arms": {found.arm.name: _comparison(found) for found in arena.comparisons},
    }


def _comparison(found: Comparison) -> dict[str, Any]:
    return {
        "verdict": found.verdict.value,
        "difference": found.test.mean if found.test else None,
        "deviation": found.test.deviation if found.test else None,
        "interval": found.test.interval(ALPHA) if found.test else None,
        "level": found.level,
        "interval_at_level": found.interval,
        "p": found.p,
        "p_sign_flip": found.p_sign_flip,
        "margin": found.margin,
        "differences": found.differences,
        "diverged": [seed for seed, apart in found.differences.items() if math.isinf(apart)],
        "missing": found.missing,
        "more_seeds": found.more,
        "parameters": found.arm.recorded("parameters"),
        "at_equal_time": _reading(found.time),
        "at_equal_flops": _reading(found.flops),
    }


def _reading(reading: Reading | None) -> dict[str, Any] | None:
    return None if reading is None else {"difference": reading.mean, "interval": reading.interval}
