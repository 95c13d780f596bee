"""Runs of train.py over the sequence length: docs/long-sequences.md, docs/results.md, docs/notes/context-length.md."""

from __future__ import annotations

from functools import partial

from matplotlib.figure import Figure

from bench.markdown import pivot, table
from bench.record import Row
from bench.tables.blocks import Rows, block, figure
from bench.tables.labels import case, thousands
from bench.tables.training import long_speeds, second_step
from recipe.drawing import Chart, Palette, label_axes, legend, log_axis, styles
from recipe.wording import short_length


@block("crossover", "crossover")
def crossover(rows: Rows) -> str:
    """Thousand tokens/s over the length, at equal tokens."""

    def rate(row: Row) -> str:
        return thousands(row["tokens_per_s"]) if row["status"] == "completed" else row["status"].replace("_", " ")

    order = ["naive", "sdpa", "flash"]
    shown = sorted(rows, key=lambda row: (order.index(case(row, "attention")), row["case"]["seq_len"]))
    columns = [f"{n:,}" for n in sorted({row["case"]["seq_len"] for row in rows})]
    return pivot(
        shown,
        lambda row: case(row, "attention"),
        lambda row: f"{row['case']['seq_len']:,}",
        rate,
        corner="thousand tokens/s",
        columns=columns,
    )


@block("context-length", "context-length")
def context_length(rows: Rows) -> str:
    """A longer context at equal tokens."""
    shown = sorted(rows, key=lambda row: ["learned positions", "ALiBi"].count(case(row, "model")), reverse=True)
    lines = []
    for row in shown:
        step, end = max((step, value) for step, value, *_ in row["evaluations"])
        per_step = next(int(o.partition("=")[2]) for o in row["overrides"] if o.startswith("training.batch_tokens="))
        lines.append(
            [
                f"{case(row, 'model')}: {case(row, 'attention')}, {row['case']['seq_len']:,} tokens",
                thousands(row["tokens_per_s"]), f"{row['peak_allocated_gib']:.1f}",
                f"{step * per_step / 1e6:.1f}", f"{end:.3f}",
            ]
        )  # fmt: skip
    return table(["", "thousand tokens/s", "GiB", "million tokens", "validation loss"], lines)


@block("equal-time", "equal-time")
def equal_time(rows: Rows) -> str:
    """Two runs of equal time."""
    lines = []
    for row in rows:
        windows = {window["seq_len"]: f"{window['loss']:.3f}" for window in row["whole_validation"]}
        lines.append(
            [
                case(row, "run"), f"{row['training_s']:.0f}", f"{row['tokens'] / 1e6:.1f}",
                f"{row['peak_allocated_gib']:.1f}", *(windows.get(n, "") for n in (256, 1024, 4096)),
            ]
        )  # fmt: skip
    heads = ["", "s of training", "million tokens", "GiB", "validation loss in windows of 256", "1,024", "4,096"]
    return table(heads, lines)


@block("equal-time-paper", "equal-time")
def equal_time_beside_the_paper(rows: Rows) -> str:
    """The same beside FlashAttention's table 4."""
    by = {case(row, "run").partition(",")[0]: row for row in rows}
    flash, naive = by["flash"], by["naive"]
    long, short = (
        next(window["perplexity"] for window in row["whole_validation"] if window["seq_len"] == n)
        for row, n in ((flash, 4096), (naive, 1024))
    )
    return table(
        ["", "theirs", "ours"],
        [
            ["seconds of training, flash with 4k and standard attention with 1k", "",
             f"{flash['training_s']:.0f} and {naive['training_s']:.0f}"],
            ["perplexity at 4k", "17.5", f"{long:.2f}"],
            ["perplexity at 1k, standard attention", "18.2", f"{short:.2f}"],
        ],
    )  # fmt: skip


@block("long-context", "long-context")
def long_context(rows: Rows) -> str:
    """Half a million tokens in one sequence."""
    speeds = long_speeds(rows)
    lines = [
        [
            {1: "one H200", 2: "two"}[row["case"]["gpus"]], f"{round(speeds[row['case']['gpus']], -2):,.0f}",
            f"{second_step(row):.1f}", f"{row['peak_allocated_gib']:.1f}",
        ]
        for row in sorted(rows, key=lambda row: row["case"]["gpus"])
    ]  # fmt: skip
    return table(["", "tokens/s", "seconds per step", "GiB per GPU"], lines)


@block("memory-wall", "memory-wall")
def memory_wall(rows: Rows) -> str:
    """The peak of a training step over the length of one sequence."""
    order = ["naive", "sdpa", "flash"]
    shown = [row for row in rows if case(row, "attention") in order and row["case"]["seq_len"] <= 524_288]

    def peak(row: Row) -> str:
        return f"{row['peak_allocated_gib']:.1f}" if row["status"] == "completed" else "out of memory"

    shown.sort(key=lambda row: (order.index(case(row, "attention")), row["case"]["seq_len"]))
    return pivot(
        shown,
        lambda row: case(row, "attention"),
        lambda row: short_length(row["case"]["seq_len"]),
        peak,
        corner="GiB",
        columns=[short_length(n) for n in sorted({row["case"]["seq_len"] for row in shown})],
    )


@figure("memory-wall", "memory-wall")
def memory_wall_figure(rows: Rows) -> Chart:
    """The memory wall."""
    return Chart("memory-wall", "Peak memory over sequence length", "", partial(draw_memory_wall, rows=rows))


def draw_memory_wall(drawing: Figure, palette: Palette, rows: Rows) -> None:
    """Peak memory over the length, both logarithmic; a cross where there was not enough."""
    axes = drawing.subplots()
    names = [name for name in ("naive", "sdpa", "flash") if any(case(row, "attention") == name for row in rows)]
    styled = styles(names, palette)
    log_axis(axes, 1, 200)
    for name in names:
        mine = sorted((row for row in rows if case(row, "attention") == name), key=lambda row: row["case"]["seq_len"])
        done = [(row["case"]["seq_len"], row["peak_allocated_gib"]) for row in mine if row["status"] == "completed"]
        style = styled[name]
        look = {"color": style.colour, "linestyle": style.line, "marker": style.marker}
        wide = 4.5 if name == "sdpa" else 1.8  # flash lies on it
        axes.plot(*zip(*done, strict=True), label=name, ms=4, lw=wide, **look)  # type: ignore[arg-type]
        short = [row["case"]["seq_len"] for row in mine if row["status"] == "out_of_memory"]
        if short:
            axes.plot(short[0], axes.get_ylim()[1], "X", color=style.colour, ms=8, clip_on=False)
    label_axes(axes, palette, "GiB at the peak; a cross: out of memory", "seq_len")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["case"]["seq_len"] for row in rows})
    axes.set_xticks(ticks, [short_length(tick) for tick in ticks])
    axes.minorticks_off()
    legend(drawing, axes, palette)
