"""The tables of training steps beside nanoGPT's."""

from __future__ import annotations

from collections.abc import Sequence

from bench.markdown import pivot
from bench.record import Row

ATTENTIONS = ("flash", "sdpa", "naive")
IDENTITY = ("attention", "shape", "dropout", "recompute", "extra", "gpus")
NANOGPT = "nanoGPT"


def gpus(row: Row) -> int:
    """The number of GPUs that trained, each with the row's batch size."""
    return row.get("gpus", 1)


def column(row: Row) -> str:
    """The name of a row in tables: its attention, further overrides and the number of GPUs."""
    recompute = row.get("recompute", "none")
    settings = [override.removeprefix("training.") for override in row.get("extra", ())]
    settings += [f"recompute={recompute}"] if recompute != "none" else []
    return " ".join([row["attention"], *settings, *([f"on {gpus(row)} GPUs"] if gpus(row) > 1 else [])])


def length(row: Row) -> int:
    """Tokens of a sequence."""
    return int(row["shape"].split("x")[1])


def result(row: Row) -> str:
    """Thousand tokens/s and the GiB at the peak, or the reason why there are none."""
    if row["status"] != "completed":
        return str(row["status"]).replace("_", " ")
    return f"{row['tokens_per_s'] / 1e3:,.0f} ({row['peak_allocated_gib']:.1f})"


def table(rows: Sequence[Row], theirs: Sequence[Row], dropout: float) -> str:
    """A line for each shape, a column for nanoGPT and each of this project's steps, at one dropout rate."""
    shown = [row for row in rows if row["dropout"] == dropout]
    shapes, order = {row["shape"] for row in shown}, (NANOGPT, *ATTENTIONS)
    nano = [row | {"attention": NANOGPT} for row in theirs if row["shape"] in shapes and row["dropout"] == dropout]
    together = sorted([*nano, *shown], key=lambda row: (length(row), order.index(row["attention"]), column(row)))
    return pivot(
        together,
        lambda row: f"{row['shape'].split('x')[0]} x {length(row):,}",
        column,
        result,
        corner=f"dropout {dropout:g}: thousand tokens/s (GiB)",
    )
