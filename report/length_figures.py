"""Figures over the sequence length: memory, speed, the crossover; and bars where there is one length alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from report.draw import Palette, dress, legend, log_axis, short_length, short_number, styles
from report.groups import Family
from report.scaling import Point, crossovers, memory_unit, points, predicted_memory

Table = dict[str, list[Point]]
HIGHEST_PREDICTION = 10  # times the largest memory that was measured


def draw_memory(figure: Figure, palette: Palette, family: Family) -> None:
    """Peak memory over length, measured and predicted, both axes logarithmic.

    A prediction ends where its implementation ran out of memory, and the axis at HIGHEST_PREDICTION.
    """
    axes = figure.add_subplot()
    table = points(family)
    measured = [point.memory_gib for found in table.values() for point in found]
    unit, factor = memory_unit(measured)
    _plot(axes, palette, table, lambda point: None if point.memory_gib is None else factor * point.memory_gib)
    for label, style in styles(list(table), palette).items():
        end = _first_out_of_memory(table[label])
        predicted = [(T, factor * gib) for T, gib in predicted_memory(family, label) if end is None or end >= T]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), color=style.colour, ls=(0, (4, 2)), lw=1.1, zorder=1)
    _finish(figure, axes, palette, family, unit, log=True)
    rows = _mark_out_of_memory(axes, palette, table)
    low, high = axes.get_ylim()
    high = min(high, HIGHEST_PREDICTION * factor * max(gib for gib in measured if gib))
    log_axis(axes, low, high * (high / low) ** (0.1 * rows))  # no line ends among the words at the upper edge


def draw_points(
    figure: Figure,
    palette: Palette,
    family: Family,
    value: Callable[[Point], float | None],
    title: str,
    log: bool = True,
) -> None:
    """One measurement of every label over length."""
    axes = figure.add_subplot()
    table = points(family)
    _plot(axes, palette, table, value)
    _finish(figure, axes, palette, family, title, log)
    _mark_out_of_memory(axes, palette, table)


def draw_mfu(figure: Figure, palette: Palette, family: Family) -> None:
    """Utilisation in both conventions, in percent."""
    axes = figure.add_subplot()
    table = points(family)
    _plot(axes, palette, table, lambda point: None if point.mfu_causal is None else 100 * point.mfu_causal)
    for label, style in styles(list(table), palette).items():
        whole = [(point.seq_len, 100 * point.mfu_full) for point in table[label] if point.mfu_full is not None]
        if whole:
            axes.plot(*zip(*whole, strict=True), color=style.colour, ls=":", lw=1.4)
    _finish(figure, axes, palette, family, "percent of the device's peak", log=False)
    axes.set_ylim(bottom=0)
    _mark_out_of_memory(axes, palette, table)


def draw_crossover(figure: Figure, palette: Palette, family: Family, reference: str) -> None:
    """Speed relative to the reference over length, with the length where each overtakes it."""
    axes = figure.add_subplot()
    table = points(family)
    theirs = {point.seq_len: point.step_ms for point in table[reference] if point.step_ms}

    def gain(point: Point) -> float | None:
        return theirs[point.seq_len] / point.step_ms if point.step_ms and point.seq_len in theirs else None

    axes.axhline(1, color=palette["naive"], lw=1.4, zorder=1)
    _plot(axes, palette, {label: found for label, found in table.items() if label != reference}, gain, list(table))
    _finish(figure, axes, palette, family, f"times as fast as {reference}", log=True)
    for crossing in crossovers(family, reference):
        if crossing.seq_len:
            axes.plot(crossing.seq_len, 1, "o", color=palette["surface"], mec=palette["ink"], mew=1.3, ms=6, zorder=5)
            axes.annotate(
                f"{crossing.seq_len:,.0f}", (crossing.seq_len, 1), xytext=(6, -12), textcoords="offset points",
                color=palette["ink"],
            )  # fmt: skip


def draw_costs(figure: Figure, palette: Palette, every: Sequence[Point], memory: str) -> None:
    """Throughput and memory as bars side by side, one row a label; `memory` says whose."""
    unit, factor = memory_unit([point.memory_gib for point in every])
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, palette, every, lambda point: point.tokens_per_s, "tokens a second")
    # In two lines, because half a figure is too narrow for one.
    _bars(right, palette, every, lambda point: factor * (point.memory_gib or 0), f"{memory},\n{unit}")


def _bars(
    axes: Axes, palette: Palette, every: Sequence[Point], value: Callable[[Point], float | None], unit: str
) -> None:
    colours = [style.colour for style in styles([point.label for point in every], palette).values()]
    values = [value(point) or 0.0 for point in every]
    axes.barh(range(len(every)), values, height=0.56, color=colours)
    for row, (point, size) in enumerate(zip(every, values, strict=True)):
        text = "out of memory" if point.out_of_memory else short_number(size) if size else "not measured"
        axes.annotate(
            text, (size, row), xytext=(4, 0), textcoords="offset points", va="center",
            color=palette["bad"] if point.out_of_memory else palette["ink"],
        )  # fmt: skip
    dress(axes, palette, unit)
    axes.set_yticks(range(len(every)), [point.label for point in every])
    axes.set_ylim(len(every) - 0.5, -0.5)
    axes.set_xlim(0, 1.32 * max([*values, 1e-9]))
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def _plot(
    axes: Axes,
    palette: Palette,
    table: Table,
    value: Callable[[Point], float | None],
    order: Iterable[str] | None = None,
) -> None:
    styled = styles(list(order or table), palette)
    for label, found in table.items():
        known = [(point.seq_len, y) for point in found if (y := value(point)) is not None]
        if known:
            axes.plot(
                *zip(*known, strict=True), color=styled[label].colour, ls=styled[label].line, lw=1.8, label=label,
                marker=styled[label].marker, markersize=4.5, zorder=3,
            )  # fmt: skip


def _first_out_of_memory(found: Sequence[Point]) -> int | None:
    """The shortest length that did not fit."""
    return min((point.seq_len for point in found if point.out_of_memory), default=None)


def _mark_out_of_memory(axes: Axes, palette: Palette, table: Table) -> int:
    """A cross on the upper edge at the first length that did not fit, in words and in the implementation's colour.

    Returns how many rows the words take.
    """
    styled = styles(list(table), palette)
    rows: dict[int, int] = {}
    for label, found in table.items():
        failed = _first_out_of_memory(found)
        if failed is None:
            continue
        row = rows[failed] = rows.get(failed, -1) + 1
        axes.annotate(
            f"{label} out of memory ✕", (failed, 1), xycoords=("data", "axes fraction"),
            xytext=(4, -7 - 13 * row), textcoords="offset points", ha="right", va="center", color=styled[label].colour,
        )  # fmt: skip
    return max(rows.values(), default=-1) + 1


def _finish(figure: Figure, axes: Axes, palette: Palette, family: Family, title: str, log: bool) -> None:
    dress(axes, palette, title, "sequence length, tokens")
    if log:
        low, high = axes.dataLim.y0, axes.dataLim.y1
        log_axis(axes, low / 1.3, high * 1.6)
    else:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + 0.15 * (top - bottom))  # room for what did not fit
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    seq_lens = [group.seq_len for group in family.groups]
    stride = -(-len(seq_lens) // 8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(seq_lens[::stride], [short_length(n) for n in seq_lens[::stride]])
    axes.minorticks_off()
    axes.set_xlim(seq_lens[0] / 1.2, seq_lens[-1] * 1.2)
    legend(figure, axes, palette)
