"""docs/models.md: the price of each part of the model, and what it gave."""

from __future__ import annotations

from bench.markdown import table
from bench.record import Row
from bench.tables.arena import of_case
from bench.tables.blocks import Rows, block


def override(row: Row) -> str:
    """The overrides of an arm, as one writes them."""
    return f"`{' '.join(row['overrides'])}`"


@block("parts", "h100:parts", "cpu:arena")
def parts(priced: Rows, arena: Rows) -> str:
    """The step with each part at 124M beside the baseline's of the same call, and what the part gave at toy size."""
    sweep = of_case(arena, "parts")
    gave = sweep["arena"]["arms"] if sweep else {}
    lines = []
    for row in priced:
        if not row["overrides"]:
            continue
        change, one = 100 * (row["baseline_ms"] / row["step_ms"] - 1), gave.get(row["arm"])
        lines.append([
            override(row), f"{row['step_ms']:.1f} ms", f"{row['baseline_ms']:.1f} ms", f"{change:+.1f} %",
            "" if one is None else f"{one['difference']:+.2f} (*{one['verdict']}*)",
        ])  # fmt: skip
    return table(["", "step", "the baseline's", "tokens/s", "loss at toy size"], lines)
