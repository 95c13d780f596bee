"""How many planted faults each check catches, and how often it accuses correct attention: docs/check.md."""

from __future__ import annotations

from collections.abc import Callable

from bench.markdown import table
from bench.record import Row
from bench.tables.blocks import Rows, block

DTYPES = ("fp32", "bf16", "fp16")


def counts(rows: Rows, lines: dict[str, Callable[[Row], bool]]) -> str:
    """A line for each question, with the number of rows of each precision for which the answer is yes."""
    of = {dtype: [row for row in rows if row["dtype"] == dtype] for dtype in DTYPES}
    head = ["", *(f"{dtype}, of {len(of[dtype])}" for dtype in DTYPES)]
    return table(head, ([label, *(str(sum(map(true, of[x]))) for x in DTYPES)] for label, true in lines.items()))


@block("attention-faults", "cpu:attention-faults")
def faults(rows: Rows) -> str:
    """How many faults each check catches."""
    return counts(
        rows,
        {
            "`gpt-attention check` in that precision alone": lambda row: bool(row["check"]),
            "`gpt-attention check` in all three precisions": lambda row: bool(row["check_higher"]),
            "the probe of a run in that precision": lambda row: row["warned"] is not None,
            "its calls of each layer in that precision alone": lambda row: not row["layers"] <= 1,
            "its comparison of whole models alone": lambda row: bool(row["whole_model"]),
        },
    )


@block("attention-right", "cpu:attention-right")
def right(rows: Rows) -> str:
    """How often correct attention is accused."""
    return counts(
        rows,
        {
            "accused by `gpt-attention check`": lambda row: bool(row["check"]),
            "accused by the probe of a run": lambda row: row["warned"] is not None or bool(row["whole_model"]),
            "with more than three quarters of the error that is allowed": lambda row: (
                max(row["largest"], row["layers"], row["layers_higher"]) > 0.75
            ),
        },
    )
