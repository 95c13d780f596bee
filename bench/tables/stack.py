"""The releases of torch, Triton and Python that one commit runs with: docs/notes/stack.md."""

from __future__ import annotations

from bench.markdown import pivot, table
from bench.record import Row
from bench.stack import NVIDIA, OTHERS
from bench.tables.blocks import Rows, block


def release(version: str) -> list[int]:
    """A version as numbers, for sorting: 2.15.0+cpu -> [2, 15, 0]."""
    return [int(number) for number in version.partition("+")[0].split(".") if number.isdigit()]


def outcome(row: Row) -> str:
    """How many tests passed, failed and were skipped; "few" where these were bench.stack's --smoke."""
    counts = ", ".join(f"{row[word]} {word}" for word in ("passed", "failed", "skipped") if row[word])
    return f"few: {counts}" if row["smoke"] else counts


@block("stack-tests", "cpu:stack-tests")
def pairs(rows: Rows) -> str:
    """The tests of each pair of torch and Python."""
    return pivot(
        sorted(rows, key=lambda row: (release(row["torch"]), release(row["python"])), reverse=True),
        lambda row: f"torch {row['torch']}, Triton {row['triton']}",
        lambda row: f"Python {row['python']}",
        outcome,
    )


@block("stack-kernels", "cpu:stack-kernels")
def kernels_of_each(rows: Rows) -> str:
    """The GPUs for which each Triton version compiles the kernels."""
    newest_first = sorted(rows, key=lambda row: release(row["triton"]), reverse=True)
    lines = [
        [f"Triton {row['triton']}, with torch {row['torch']}", *(row["kernels"][name] for name in (*NVIDIA, *OTHERS))]
        for row in newest_first
    ]
    return table(["", *NVIDIA, *OTHERS], lines)
