"""What the report reads of a folder with synthetic runs, whose files tests may change before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipe.compare.arena_results import Arena, compare_arms
from recipe.compare.runs import Run, find_runs
from recipe.compare.sweeps import Cell, Sweep, cells_of, sweeps_of
from recipe.compare.tables import Table
from recipe.run.plan import Plan, read_plan
from tests.lines import write_lines

Line = dict[str, Any]


def runs_in(folder: Path) -> tuple[Run, ...]:
    return find_runs([folder]).runs


def cells_in(folder: Path) -> list[Cell]:
    return cells_of(runs_in(folder))


def only_sweep(folder: Path) -> Sweep:
    (sweep,) = sweeps_of(runs_in(folder))
    return sweep


def plan_of(folder: Path) -> Plan:
    plan = read_plan(folder)
    assert plan is not None
    return plan


def arena_of(folder: Path) -> Arena:
    return compare_arms(plan_of(folder), runs_in(folder))


def rows_of(table: Table | None) -> list[dict[str, str]]:
    assert table is not None
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def edit(run: Path, change: Callable[[Line], Line]) -> None:
    """Change each line of metrics.jsonl."""
    path = run / "metrics.jsonl"
    write_lines(path, [change(json.loads(line)) for line in path.read_text().splitlines()])


def edit_summary(run: Path, change: Callable[[Line], Line]) -> None:
    path = run / "summary.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
