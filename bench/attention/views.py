"""Tables and figures of the rows of bench.attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bench.markdown import both, pivot
from recipe.drawing import Chart, Palette, Style, height_for, label_axes, legend, log_axis, styles
from recipe.wording import short_length, short_number

SHORT = {"out of memory": "OOM", "too slow": "slow", "refused": "-", "failed": "failed"}

Row = dict[str, Any]
Value = Callable[[Row], float | None]


def series(rows: Iterable[Row]) -> dict[tuple[int, str, float], list[Row]]:
    """(head size, variant, dropout) -> rows."""
    groups: dict[tuple[int, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["head_size"], row["variant"], row["dropout"]), []).append(row)
    return groups


def named(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """label -> rows from short to long, for labels with any measurement."""
    labels = dict.fromkeys(row["label"] for row in rows if row["status"] == "measured")
    return {label: sorted((r for r in rows if r["label"] == label), key=lambda r: r["length"]) for label in labels}


def lengths(rows: Iterable[Row]) -> list[int]:
    """The lengths that were measured."""
    return sorted({row["length"] for row in rows})


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown for each head size, mask and dropout: speed and its ratio to the fastest peer, memory and error."""
    for (head_size, variant, dropout), rows_of_table in series(rows).items():
        cells = [row for label in named(rows_of_table).values() for row in label]
        title = f"head size {head_size}, {variant}, dropout {dropout:g}"
        for content, cell in {
            "TFLOP/s forward/backward (times the fastest peer)": speed_cell,
            "MiB above the inputs, largest relative error": cost_cell,
        }.items():
            columns = [short_length(length) for length in lengths(rows_of_table)]
            yield f"\n{title}: {content}\n\n{pivot(cells, label_of, length_of, cell, columns=columns)}"


def label_of(row: Row) -> str:
    """The name of a row in tables."""
    return str(row["label"])


def length_of(row: Row) -> str:
    """The length of a row: 512, 16k."""
    return short_length(row["length"])


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """The times of first calls, and each reason for empty cells once. Cells themselves say "OOM" or "slow"."""
    first = {
        label: max((row.get("first_call_s", 0.0) for row in cells), default=0.0) for label, cells in named(rows).items()
    }
    longest = ", ".join(f"{label} {seconds:.1f} s" for label, seconds in first.items() if seconds)
    if longest:
        yield f"The longest first call, forward and backward, with the compilation that it needed: {longest}."
    missing = [r for r in rows if r["status"] in ("refused", "failed")]
    for label, message in dict.fromkeys((row["label"], row["message"]) for row in missing):
        yield f"{label}: {message}"


def speed_cell(row: Row) -> str:
    """TFLOP/s of both passes, for flash with the ratio to the fastest peer; or the reason why there are none."""
    if row["status"] != "measured":
        return SHORT[row["status"]]
    ratio = row["name"] == "flash" and "of_fastest_peer" in row["forward"]
    speeds = "/".join(figures(row[direction]["tflops"]) for direction in ("forward", "backward"))
    return speeds + (f" ({both(row, 'of_fastest_peer', 2)})" if ratio else "")


def cost_cell(row: Row) -> str:
    """Memory, and the largest error among output and gradients."""
    if row["status"] != "measured":
        return SHORT[row["status"]]
    memory = "?" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:,.0f}"
    return f"{memory}  {max(row['error'].values()):.0e}" if row["error"] else memory


def figures(value: float) -> str:
    """Two digits, or all before the point: 312, 45, 4.1, 0.032"""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def chart_of(rows: Sequence[Row], kind: str, head_size: int) -> Chart:
    """The causal figure of a head size: "speed" or "memory"."""
    shown = [row for row in rows if row["head_size"] == head_size and row["variant"] == "causal"]
    draw, taller = {"speed": (draw_speed, 2.2), "memory": (draw_memory, 1.0)}[kind]
    title = f"Attention, head size {head_size}, causal: {kind}"
    return Chart(f"{kind}-d{head_size}", title, "", partial(draw, rows=shown), taller * height_for(list(named(shown))))


def tflops(direction: str) -> Value:
    return lambda row: row[direction]["tflops"] if direction in row else None


def gibibytes(row: Row) -> float | None:
    return row["extra_bytes"] / 2**30 if row.get("extra_bytes") is not None else None


def dropouts(rows: Sequence[Row]) -> list[float]:
    return sorted({row["dropout"] for row in rows})


def line_styles(rows: Sequence[Row], palette: Palette) -> dict[str, Style]:
    """A style for each label, the same in all axes of a figure; other projects get tints of one colour."""
    labels = list(named(rows))
    ours_or_torch = {row["label"] for row in rows if row["ours"] or row["name"].startswith("sdpa")}
    keys = [label if label in ours_or_torch else f"other {label}" for label in labels]
    return dict(zip(labels, styles(keys, palette).values(), strict=True))


def draw_speed(figure: Figure, palette: Palette, rows: Sequence[Row]) -> None:
    """TFLOP/s over length: a row for each dropout, a column for each pass."""
    rates = dropouts(rows)
    fastest = max(tflops(direction)(row) or 0 for row in rows for direction in ("forward", "backward"))
    grid = figure.subplots(len(rates), 2, squeeze=False, sharey=True)
    for axes_of_rate, rate in zip(grid, rates, strict=True):
        for axes, direction in zip(axes_of_rate, ("forward", "backward"), strict=True):
            plot(axes, palette, rows, rate, tflops(direction), f"{direction}, dropout {rate:g}: TFLOP/s")
            axes.set_ylim(0, 1.05 * fastest)
    legend_of_all(figure, grid.flat, palette)


def draw_memory(figure: Figure, palette: Palette, rows: Sequence[Row]) -> None:
    """Memory over length, both logarithmic, side by side for each dropout; a cross where the memory did not suffice."""
    rates, styled = dropouts(rows), line_styles(rows, palette)
    grid = figure.subplots(1, len(rates), squeeze=False, sharey=True)[0]
    values = [x for x in map(gibibytes, rows) if x]
    for axes, rate in zip(grid, rates, strict=True):
        title = f"GiB above the inputs, dropout {rate:g}" if rate == rates[0] else f"dropout {rate:g}"
        plot(axes, palette, rows, rate, gibibytes, title)
        log_axis(axes, min(values) / 1.5, max(values) * 1.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short_number(y)))
        for label, cells in named([row for row in rows if row["dropout"] == rate]).items():
            short = [row["length"] for row in cells if row["status"] == "out of memory"]
            if short:
                axes.plot(short[0], axes.get_ylim()[1], "X", color=styled[label].colour, ms=7, clip_on=False)
    legend_of_all(figure, grid, palette)


def plot(axes: Axes, palette: Palette, rows: Sequence[Row], rate: float, value: Value, title: str) -> None:
    """A line for each label over length."""
    styled = line_styles(rows, palette)
    for label, cells in named([row for row in rows if row["dropout"] == rate]).items():
        points = [(row["length"], value(row)) for row in cells if value(row) is not None]
        if points:
            style = styled[label]
            axes.plot(
                *zip(*points, strict=True), label=label, color=style.colour, linestyle=style.line, marker=style.marker,
                markersize=3.5, linewidth=1.6,
            )  # fmt: skip
    label_axes(axes, palette, title, "tokens")
    over_lengths(axes, lengths(rows))


def over_lengths(axes: Axes, ticks: Sequence[int]) -> None:
    """A logarithmic axis of lengths that names at most five of the ticks."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 5)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: short_length(length)))


def legend_of_all(figure: Figure, grid: Iterable[Axes], palette: Palette) -> None:
    """The legend of the axes with the most lines."""
    legend(figure, max(grid, key=lambda axes: len(axes.get_legend_handles_labels()[0])), palette)
