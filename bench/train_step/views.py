"""Rows of training steps beside nanoGPT's, and their figure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.attention.views import over_lengths
from bench.record import Row
from recipe.drawing import Chart, Palette, label_axes, legend, styles

ATTENTIONS = ("flash", "sdpa", "naive")
IDENTITY = ("attention", "shape", "dropout", "recompute", "extra", "gpus")
NANOGPT = "nanoGPT"


def gpus(row: Row) -> int:
    """The number of GPUs that trained, each with the row's batch size."""
    return row.get("gpus", 1)


def column(row: Row) -> str:
    """The name of a row in tables and legends: its attention, further overrides and the number of GPUs."""
    given = (override.removeprefix("training.") for override in row.get("extra", ()))
    several = [f"on {gpus(row)} GPUs"] if gpus(row) > 1 else []
    return " ".join([row["attention"], *given, *several])


def columns(rows: Sequence[Row]) -> list[str]:
    """The columns' names: nanoGPT, then this project's in the order of ATTENTIONS."""
    order = (NANOGPT, *ATTENTIONS)
    return sorted({column(row) for row in rows}, key=lambda name: (order.index(name.split(" ")[0]), name))


def result(row: Row) -> str:
    """tokens/s and peak memory, or the reason why there are none."""
    if row["status"] != "completed":
        return str(row["status"]).replace("_", " ")
    speed, gib = row["tokens_per_s"], row.get("peak_allocated_gib")
    return f"{speed:,.0f} ({gib:.1f})" if gib else f"{speed:,.0f}"


def beside(rows: Sequence[Row], theirs: Sequence[Row]) -> list[Row]:
    """This project's rows and nanoGPT's of the same shapes and dropout, as rows of one table."""
    shown = {(row["shape"], row["dropout"]) for row in rows}
    nano = [row | {"attention": NANOGPT} for row in theirs if (row["shape"], row["dropout"]) in shown]
    return [*nano, *rows]


def length(row: Row) -> int:
    """Tokens of a sequence."""
    return int(row["shape"].split("x")[1])


def other_attention(row: Row) -> bool:
    """Whether further overrides change the visible keys: the figures leave such rows out."""
    return any(override.startswith(("score", "data.documents=")) for override in row["extra"])


def chart(rows: Sequence[Row], theirs: Sequence[Row], dropout: float) -> Chart:
    """The figure of the steps with a dropout rate: tokens/s and peak memory over sequence length."""
    shown = [r for r in rows if r["dropout"] == dropout and r["recompute"] == "none" and not other_attention(r)]
    return Chart(
        f"train-step-dropout-{dropout:g}",
        f"Training GPT-2 (124M), 32,768 tokens per step, dropout {dropout:g}",
        "Median of the steps of a run; nanoGPT by nanoGPT's benchmark.",
        partial(draw, rows=beside(shown, theirs)),
    )


def draw(figure: Figure, palette: Palette, rows: Sequence[Row]) -> None:
    """Tokens/s and peak memory over sequence length, nanoGPT's dashed."""
    speed, memory = figure.subplots(1, 2)
    names = columns(rows)
    styled = styles([name for name in names if name != NANOGPT], palette)
    for name in names:
        look: dict[str, Any] = {"color": palette["muted"], "linestyle": "--", "lw": 1.4}
        if name != NANOGPT:
            style = styled[name]
            look = {"color": style.colour, "linestyle": style.line, "marker": style.marker, "ms": 5, "lw": 1.8}
        curves(speed, memory, [row for row in rows if column(row) == name], look | {"label": name})
    for axes, title in ((speed, "thousand tokens/s"), (memory, "GiB at the peak")):
        label_axes(axes, palette, title, "seq_len")
        over_lengths(axes, sorted({length(row) for row in rows}))
        axes.set_ylim(bottom=0)
    legend(figure, speed, palette)


def curves(speed: Axes, memory: Axes, rows: Sequence[Row], look: dict[str, Any]) -> None:
    """One line of each figure: the rows that completed, from short to long."""
    done = sorted((row for row in rows if row["status"] == "completed"), key=length)
    lengths = [length(row) for row in done]
    speed.plot(lengths, [row["tokens_per_s"] / 1e3 for row in done], **look)
    memory.plot(lengths, [row.get("peak_allocated_gib", 0) for row in done], **look)
