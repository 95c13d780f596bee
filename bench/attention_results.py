"""The result files of bench/attention.py: read, joined and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.peers import VARIANTS

Row = dict[str, Any]


def read(path: Path) -> Row:
    """An earlier result. Rows from before there were variants say whether they are causal instead."""
    result: Row = json.loads(path.read_text())
    for row in result["rows"]:
        if "causal" in row:
            row["variant"] = "causal" if row.pop("causal") else "full"
    return result


def comparable(path: Path, result: Row, dtype: str) -> list[Row]:
    """The rows in `path` with the device, software, size of the work and dtype of this result: tables and figures show
    none of these."""
    found = read(path)
    same = all(found.get(name) == result[name] for name in ("device", "versions", "tokens", "hidden"))
    return [row for row in found["rows"] if same and row["dtype"] == dtype]


def joined(rows: Iterable[Row]) -> list[Row]:
    """The rows in order; of a problem measured twice, the last one."""
    order = list(VARIANTS)
    last = {
        (row["head_size"], order.index(row["variant"]), row["dropout"], row["length"], row["name"]): row for row in rows
    }
    return [last[place] for place in sorted(last, key=lambda place: place[:4])]


def when(result: Row) -> Row:
    """When and at which commit a row was measured."""
    return {"date": result["date"], "commit": result["git"]["commit"], "dirty": result["git"]["dirty"]}


def as_json(result: Row, rows: Sequence[Row]) -> str:
    """The result as JSON, one row per line."""
    head = json.dumps(result, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return f'{head},\n "rows": [\n  {lines}\n ]\n}}\n'
