"""docs/models.md: the price of each part of the model, and what it gave."""

from __future__ import annotations

from bench.markdown import table
from bench.record import Row
from bench.tables.arena import of_case
from bench.tables.blocks import Rows, block


def override(row: Row) -> str:
    """The overrides of an arm, as one writes them."""
    return f"`{' '.join(row['overrides'])}`"


@block("parts", "parts", "h100:parts", "cpu:arena")
def parts(h200: Rows, h100: Rows, arena: Rows) -> str:
    """The step with each part at 124M beside the baseline's of the same call, and what the part gave at toy size."""
    sweep = of_case(arena, "parts")
    gave = sweep["arena"]["arms"] if sweep else {}
    lines = []
    for gpu, row in (*(("H200", row) for row in h200), *(("H100", row) for row in h100)):
        if not row["overrides"]:
            continue
        change, one = 100 * (row["baseline_ms"] / row["step_ms"] - 1), gave.get(row["arm"])
        lines.append([
            override(row), gpu, f"{row['step_ms']:.1f} ms", f"{row['baseline_ms']:.1f} ms", f"{change:+.1f} %",
            "" if one is None else f"{one['difference']:+.2f} (*{one['verdict']}*)",
        ])  # fmt: skip
    return table(["", "GPU", "step", "the baseline's", "tokens/s", "loss at toy size"], lines)


@block("llama-train", "llama")
def llama_train(rows: Rows) -> str:
    """The training step of Llama 1B, and its share of the GPU's peak."""
    lines = [
        [
            row["by"], f"{row['step_ms']:.0f} ms", f"{row['tokens_per_s']:,.0f}", f"{100 * row['mfu_causal']:.1f} %",
            f"{100 * row['mfu_full']:.1f} %", f"{row['peak_allocated_gib']:.1f} GiB",
        ]
        for row in rows
        if row["case"] == "train" and row["status"] == "completed"
    ]  # fmt: skip
    return table(["by", "step", "tokens/s", "MFU, causal", "MFU, full attention", "memory"], lines)


@block("llama-cpu", "cpu:llama")
def llama_cpu(rows: Rows) -> str:
    """A step of Llama 160M beside transformers'."""
    lines = [
        [
            f"{row['tokens']:,}", row["by"], f"{row['step_s']:.2f} s", f"{row['tokens_per_s']:,.0f}",
            f"{row['times_transformers']:.2f}",
        ]
        for row in rows
        if row["case"] == "cpu"
    ]  # fmt: skip
    return table(["tokens of a step", "by", "step", "tokens/s", "times transformers"], lines)
