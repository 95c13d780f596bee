"""The figures of the report: each a function that draws one on an empty figure, chosen by what the runs measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator

from report.draw import (
    Chart,
    Palette,
    dress,
    legend,
    lengths,
    plain_numbers,
    power_of_ten,
    short_number,
    styles,
)
from report.evidence import MARGIN, difference, seed_band
from report.groups import Family, Group
from report.parity import Judgement
from report.record import Run, Series
from report.scaling import Point, crossovers, points, predicted_memory

OUT_OF_MEMORY = "x"


def charts(family: Family, judgements: Sequence[Judgement], reference: str = "naive", prefix: str = "") -> list[Chart]:
    """The figures that the runs of a family allow, in the order in which they are read.

    prefix   of the files' names, where several families stand on a page
    """
    found: list[Chart] = []
    widest = max(family.groups, key=lambda group: (len(group.runs), _logged(group)))
    if _logged(widest):
        found += _curve_charts(widest, [j for j in judgements if j.group is widest or j.group == widest], reference)
    if len(family.groups) > 1:
        found += _length_charts(family, reference)
    else:
        found += _bar_charts(family)
    return [Chart(prefix + c.name, c.title, c.caption, c.draw, c.height) for c in found]


def _logged(group: Group) -> int:
    return max((len(run.series("train/loss")) for run in group.runs), default=0)


def _runs_of(group: Group) -> list[tuple[str, Run]]:
    return [(label, run) for label in group.labels() for run in group.of(label).values()]


def _curve_charts(group: Group, judgements: Sequence[Judgement], reference: str) -> list[Chart]:
    found = [
        Chart(
            "loss",
            "Loss",
            "Training (thin) and validation loss (thick, with marks) of every seed. Curves of one seed that coincide "
            "lie on top of each other: the lines grow thinner from the reference on.",
            lambda figure, palette: draw_loss(figure, palette, group),
        )
    ]
    if judgements and any(j.curve for j in judgements):
        found.append(
            Chart(
                "difference",
                f"Difference to {reference} of the same seed",
                f"Training loss minus {reference}'s, seed by seed, on a symmetric logarithmic axis. The band is how "
                f"far {reference}'s own seeds are from each other.",
                lambda figure, palette: draw_difference(figure, palette, group, reference),
            )
        )
    if any(j.probe for j in judgements):
        found.append(
            Chart(
                "probe",
                "At the same weights",
                f"What the probe inside the runs found: how far gradients (lines) and logits (dotted) are from "
                f"{reference}'s at the same weights, batch and masks, in units of {reference}'s own rounding error. "
                f"A right implementation stays near 1; up to {MARGIN:g} is accepted.",
                lambda figure, palette: draw_probe(figure, palette, group, reference),
            )
        )
    return found


def _length_charts(family: Family, reference: str) -> list[Chart]:
    table = points(family)
    every = [point for found in table.values() for point in found]
    found = []
    if any(point.memory_gib for point in every):
        attention_only = any(run.summary.get("memory_source") == "attention" for run in family.runs)
        found.append(
            Chart(
                "memory",
                "Memory of one attention layer" if attention_only else "Peak memory",
                "Marks are measured; dashes are predicted from the shortest lengths: tiles linear in the length, "
                "scores that are kept quadratic. A cross is a run that did not fit."
                + (
                    " On a CPU the attention's own allocations are counted, not the process's."
                    if attention_only
                    else ""
                ),
                lambda figure, palette: draw_memory(figure, palette, family),
            )
        )
    if any(point.tokens_per_s for point in every):
        found.append(
            Chart(
                "throughput",
                "Throughput",
                "Median tokens a second. A cross marks the length at which an implementation ran out of memory.",
                lambda figure, palette: draw_points(
                    figure, palette, family, lambda point: point.tokens_per_s, "tokens a second"
                ),
            )
        )
    if any(point.mfu_causal for point in every):
        found.append(
            Chart(
                "mfu",
                "Model FLOPs utilisation",
                "Share of the device's peak: attention counted as causality leaves it (lines), or whole (dotted).",
                lambda figure, palette: draw_mfu(figure, palette, family),
            )
        )
    if crossovers(family, reference):
        found.append(
            Chart(
                "crossover",
                f"Speed beside {reference}",
                f"Step time of {reference} over that of each implementation: above 1 it is the faster one.",
                lambda figure, palette: draw_crossover(figure, palette, family, reference),
            )
        )
    if sum(point.val_loss is not None for point in every) > len(table):
        found.append(
            Chart(
                "context",
                "Validation loss over context length",
                "Final validation loss of runs that differ in their sequence length.",
                lambda figure, palette: draw_points(
                    figure, palette, family, lambda point: point.val_loss, "validation loss (nats a token)", log=False
                ),
            )
        )
    return found


def _bar_charts(family: Family) -> list[Chart]:
    every = [found[0] for found in points(family).values() if found]

    def bars(name: str, title: str, unit: str, value: Callable[[Point], float | None]) -> list[Chart]:
        if len(every) < 2 or not any(map(value, every)):
            return []
        caption = "Median over the seeds; a cross is a run that did not fit the memory."
        height = 0.8 + 0.34 * len(every)
        return [
            Chart(name, title, caption, lambda figure, colours: draw_bars(figure, colours, every, value, unit), height)
        ]

    return [
        *bars("throughput", "Throughput", "median tokens a second", lambda point: point.tokens_per_s),
        *bars("memory", "Peak memory", "GiB", lambda point: point.memory_gib),
    ]


def draw_loss(figure: Figure, palette: Palette, group: Group) -> None:
    """Training and validation loss over steps."""
    axes = figure.add_subplot()
    styled = styles(group.labels(), palette)
    tops, bottoms = [], []
    named = set()
    for label, run in _runs_of(group):
        style = styled[label]
        train, val = run.series("train/loss").finite(), run.series("val/loss").finite()
        faint = 0.35 if len(val) > 1 else 0.9
        name = None if label in named else label
        axes.plot(
            train.steps, train.values, color=style.colour, ls=style.line, lw=0.45 * style.width, alpha=faint,
            label=name if len(val) < 2 else None,
        )  # fmt: skip
        if len(val) > 1:
            axes.plot(
                val.steps, val.values, color=style.colour, ls=style.line, lw=style.width, label=name,
                marker=style.marker if len(val) < 40 else None, markersize=1.1 * style.width + 1.2,
            )  # fmt: skip
        named.add(label)
        if len(train):
            tops.append(train.values[len(train) // 20])
            bottoms.append(train.values.min())
    dress(axes, palette, "loss (nats a token)", "step")
    if tops and max(tops) > min(bottoms):
        # The first twentieth falls from the logarithm of the vocabulary and would flatten all the rest.
        axes.set_ylim(min(bottoms) - 0.05 * (max(tops) - min(bottoms)), max(tops))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(figure, axes, palette)


def draw_difference(figure: Figure, palette: Palette, group: Group, reference: str) -> None:
    """Training loss minus the reference's of the same seed, and the seeds' distance as a band."""
    axes = figure.add_subplot()
    references = group.of(reference)
    styled = styles(group.labels(), palette)
    apart: list[Series] = []
    for label in group.labels():
        if label == reference:
            continue
        name: str | None = label
        for seed, run in group.of(label).items():
            if seed in references and len(found := difference(run, references[seed])):
                style = styled[label]
                axes.plot(found.steps, found.values, color=style.colour, ls=style.line, lw=1.1, alpha=0.85, label=name)
                apart.append(found)
                name = None
    sizes = np.abs(np.concatenate([found.values for found in apart] or [np.ones(1)]))
    smallest = float(np.percentile(sizes[sizes > 0], 10)) if (sizes > 0).any() else 1e-7
    band = seed_band(list(references.values()))
    if band:
        axes.fill_between(
            band.train.steps, -band.train.values, band.train.values, color=palette["band"], lw=0, zorder=0,
            label=f"between {reference}'s {len(band.seeds)} seeds",
        )  # fmt: skip
    axes.axhline(0, color=palette["naive"], lw=1, zorder=1)
    dress(axes, palette, f"training loss, minus {reference}'s", "step")
    threshold = 10.0 ** np.floor(np.log10(max(smallest, 1e-9)))
    axes.set_yscale("symlog", linthresh=threshold, linscale=0.6)
    largest = max([float(sizes.max()), *(band.train.values.max() if band else 0.0,)])
    top = 10.0 ** np.ceil(np.log10(max(largest, threshold)))
    decades = round(np.log10(top / threshold))
    stride = max(1, -(-decades // 3))
    ticks = [threshold * 10.0**n for n in range(decades, -1, -stride)]
    axes.set_yticks([*(-tick for tick in ticks), 0, *reversed(ticks)])
    axes.yaxis.set_minor_locator(SymmetricalLogLocator(base=10, linthresh=threshold, subs=[10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.set_ylim(-top * 1.3, top * 1.3)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(figure, axes, palette)


def draw_probe(figure: Figure, palette: Palette, group: Group, reference: str) -> None:
    """The probe's differences in units of the reference's own rounding."""
    axes = figure.add_subplot()
    styled = styles(group.labels(), palette)
    named = set()
    for label, run in _runs_of(group):
        style = styled[label]
        for measure, line in (("grad_rel_err", "-"), ("logits_max_diff", ":")):
            apart, noise = run.series(f"parity/{measure}"), run.series(f"parity/noise_{measure}")
            steps, here, there = np.intersect1d(apart.steps, noise.steps, return_indices=True)
            if label == reference or not len(steps):
                continue
            with np.errstate(divide="ignore", invalid="ignore"):
                shares = apart.values[here] / noise.values[there]
            name = None if label in named else label
            axes.plot(steps, shares, color=style.colour, ls=line, lw=1.3, marker=style.marker, markersize=3, label=name)
            named.add(label)
    axes.axhspan(1e-9, MARGIN, color=palette["band"], lw=0, zorder=0)
    axes.axhline(1, color=palette["naive"], lw=1, zorder=1)
    dress(axes, palette, f"difference, in units of {reference}'s rounding", "step")
    low, high = axes.dataLim.y0, axes.dataLim.y1
    axes.set_yscale("log")
    if np.isfinite([low, high]).all() and high > 0:
        axes.set_ylim(min(0.1, 0.5 * max(low, 1e-6)), max(10.0, 2 * high))
    plain_numbers(axes)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    legend(figure, axes, palette)


def draw_memory(figure: Figure, palette: Palette, family: Family) -> None:
    """Peak memory over length, measured and predicted, both axes logarithmic."""
    axes = figure.add_subplot()
    table = points(family)
    _plot_points(axes, palette, table, lambda point: point.memory_gib)
    styled = styles(list(table), palette)
    for label in table:
        predicted = predicted_memory(family, label)
        if predicted:
            axes.plot(
                *zip(*predicted, strict=True), color=styled[label].colour, ls=(0, (4, 2)), lw=1, alpha=0.8, zorder=1
            )
    _finish_lengths(figure, axes, palette, family, table, "peak memory, GiB", log=True)


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
    _plot_points(axes, palette, table, value)
    _finish_lengths(figure, axes, palette, family, table, title, log)


def draw_mfu(figure: Figure, palette: Palette, family: Family) -> None:
    """Utilisation in both conventions, in percent."""
    axes = figure.add_subplot()
    table = points(family)
    _plot_points(axes, palette, table, lambda point: None if point.mfu_causal is None else 100 * point.mfu_causal)
    for label, style in styles(list(table), palette).items():
        full = [(point.seq_len, 100 * point.mfu_full) for point in table[label] if point.mfu_full is not None]
        if full:
            axes.plot(*zip(*full, strict=True), color=style.colour, ls=":", lw=1.2)
    _finish_lengths(figure, axes, palette, family, table, "percent of the device's peak", log=False)
    axes.set_ylim(bottom=0)


def draw_crossover(figure: Figure, palette: Palette, family: Family, reference: str) -> None:
    """Speed relative to the reference over length, with the length where each overtakes it."""
    axes = figure.add_subplot()
    table = points(family)
    theirs = {point.seq_len: point.step_ms for point in table[reference] if point.step_ms}

    def gain(point: Point) -> float | None:
        return theirs[point.seq_len] / point.step_ms if point.step_ms and point.seq_len in theirs else None

    others = {label: found for label, found in table.items() if label != reference}
    _plot_points(axes, palette, others, gain, order=list(table), out_of_memory=False)
    axes.axhline(1, color=palette["naive"], lw=1.4, zorder=1)
    for crossing in crossovers(family, reference):
        if crossing.seq_len:
            axes.plot(crossing.seq_len, 1, "o", color=palette["surface"], mec=palette["ink"], mew=1.2, ms=6, zorder=5)
            axes.annotate(
                f"{crossing.seq_len:,.0f}", (crossing.seq_len, 1), xytext=(5, -12), textcoords="offset points",
                color=palette["ink"],
            )  # fmt: skip
    _finish_lengths(figure, axes, palette, family, others, f"times as fast as {reference}", log=True)


def draw_bars(
    figure: Figure, palette: Palette, every: Sequence[Point], value: Callable[[Point], float | None], unit: str
) -> None:
    """One bar a label, its value at its end."""
    axes = figure.add_subplot()
    styled = styles([point.label for point in every], palette)
    values = [value(point) or 0.0 for point in every]
    axes.barh(range(len(every)), values, height=0.56, color=[styled[point.label].colour for point in every])
    for row, (point, size) in enumerate(zip(every, values, strict=True)):
        text = "out of memory" if point.out_of_memory else short_number(size) if size else "not measured"
        axes.annotate(
            text, (size, row), xytext=(5, 0), textcoords="offset points", va="center",
            color=palette["bad"] if point.out_of_memory else palette["ink"],
        )  # fmt: skip
    dress(axes, palette, unit)
    axes.set_yticks(range(len(every)), [point.label for point in every])
    axes.set_ylim(len(every) - 0.5, -0.5)
    axes.set_xlim(0, 1.18 * max([*values, 1e-9]))
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def _plot_points(
    axes: Axes,
    palette: Palette,
    table: dict[str, list[Point]],
    value: Callable[[Point], float | None],
    order: list[str] | None = None,
    out_of_memory: bool = True,
) -> None:
    styled = styles(order or list(table), palette)
    for label, found in table.items():
        style = styled[label]
        known = [(point.seq_len, y) for point in found if (y := value(point)) is not None]
        if known:
            axes.plot(
                *zip(*known, strict=True), color=style.colour, ls=style.line, lw=1.8, label=label,
                marker=style.marker, markersize=4.5, zorder=3,
            )  # fmt: skip
    if out_of_memory:
        _mark_out_of_memory(axes, palette, table, styled_order=list(styled))


def _mark_out_of_memory(axes: Axes, palette: Palette, table: dict[str, list[Point]], styled_order: list[str]) -> None:
    """A cross on the upper edge at the first length that did not fit, in the colour of its implementation."""
    styled = styles(styled_order, palette)
    failed = [
        (min(point.seq_len for point in found if point.out_of_memory), label)
        for label, found in table.items()
        if any(point.out_of_memory for point in found)
    ]
    at: dict[int, int] = {}
    for seq_len, label in sorted(failed):
        row = at[seq_len] = at.get(seq_len, -1) + 1
        axes.annotate(
            "✕", (seq_len, 1), xycoords=("data", "axes fraction"), xytext=(0, -6 - 12 * row),
            textcoords="offset points", ha="center", va="center", color=styled[label].colour, weight="bold",
        )  # fmt: skip
        axes.plot([seq_len], [np.nan])


def _finish_lengths(
    figure: Figure,
    axes: Axes,
    palette: Palette,
    family: Family,
    table: dict[str, list[Point]],
    title: str,
    log: bool,
) -> None:
    dress(axes, palette, title, "sequence length, tokens")
    if log:
        axes.set_yscale("log")
        plain_numbers(axes)
    seq_lens = [group.seq_len for group in family.groups]
    lengths(axes, seq_lens)
    axes.set_xlim(seq_lens[0] / 1.2, seq_lens[-1] * 1.2)
    legend(figure, axes, palette)
