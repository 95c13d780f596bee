"""Rows of measurements as tables in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from recipe.wording import markdown_table as table

Row = dict[str, Any]
Text = Callable[[Row], str]


def pivot(
    rows: Iterable[Row], line: Text, column: Text, cell: Text, *, corner: str = "", columns: Sequence[str] = ()
) -> str:
    """A table with a line and a column for each value that rows have; empty where there is no row.

    line, column, cell   texts of a row: the first cell of its line, its column's heading, and its cell
    corner               the heading of the first column
    columns              the headings in their order; default: the order in which rows first name them, as for lines
    """
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(line(row), {})[column(row)] = cell(row)
    headings = list(columns) or list(dict.fromkeys(heading for line_cells in cells.values() for heading in line_cells))
    lines = ([label, *(line_cells.get(heading, "") for heading in headings)] for label, line_cells in cells.items())
    return table([corner, *headings], lines)


def both(row: Row, value: str, digits: int = 0) -> str:
    """A value of the forward and of the backward pass: 352/355."""
    return "/".join(f"{row[direction][value]:,.{digits}f}" for direction in ("forward", "backward"))
