"""The drawing of the figures of runs: curves over steps, and measurements over the sequence length or the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from recipe.compare.costs import Point, points
from recipe.compare.parity import EPS, MEASURES, beside_rounding, rolling_rms, rounding_of_a_step, seed_spread
from recipe.compare.runs import Run
from recipe.compare.sweeps import Cell, Sweep, difference
from recipe.drawing import COLOURS, finish_steps, label_axes, legend, log_axis, styles
from recipe.training.parity import PARITY_MARGIN
from recipe.wording import short_length

Curves = Mapping[str, Sequence[Run]]  # the name of a curve, and its seeds
Value = Callable[[Point], float | None]
Dots = Mapping[str, Sequence[tuple[int, float]]]  # the name of a line, and its points


def draw_losses(figure: Figure, curves: Curves, coincide: bool) -> None:
    """Training losses over steps, validation losses as marks; of curves that are to `coincide` the first is wide."""
    axes = figure.add_subplot()
    looks, others, shown = styles(list(curves)), len(curves) - 1, [np.zeros(0)]
    for n, (name, runs) in enumerate(curves.items()):
        # Dashes with gaps, so that coinciding curves show alternately.
        line = (4.0 * (n - 1), (4.0, 4.0 * (others - 1))) if coincide and n and others > 1 else "-"
        width = 3.2 if coincide and n == 0 and others else 1.5
        axes.plot([], [], color=looks[name].colour, lw=width, label=name)  # solid in the legend
        for run in runs:
            series, val = run.series("train/loss").finite(), run.series("val/loss").finite()
            axes.plot(*series, color=looks[name].colour, ls=line, lw=width, zorder=2 + 0.1 * n)
            if len(val.steps) > 1:
                axes.plot(
                    *val, ls="", marker=looks[name].marker, color=looks[name].colour, mec=COLOURS["surface"], mew=0.8,
                    ms=7 if width > 2 else 5, zorder=4 + 0.1 * n,
                )  # fmt: skip
            # The start falls from the logarithm of the vocabulary and would flatten all the rest.
            shown.append(series.values[len(series.values) // 12 :])
    if len(values := np.concatenate(shown)):
        margin = 0.06 * (values.max() - values.min()) + 1e-3
        axes.set_ylim(values.min() - margin, values.max() + margin)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # they may differ in the fourth digit
    finish_steps(figure, axes, "loss, nats per token")


def draw_difference(figure: Figure, cell: Cell, reference: str) -> None:
    """|training loss - the reference's of the same seed|, with the spread between its seeds and its rounding."""
    axes = figure.add_subplot()
    references, looks = cell.of(reference), styles(cell.labels())
    sizes, last = [np.zeros(0)], 1
    for label in cell.labels():
        for seed in cell.of(label).keys() & references.keys() if label != reference else ():
            steps, distance = difference(cell.of(label)[seed], references[seed])
            last = max([last, *steps[-1:]])
            for values, width, alpha, name in (
                (np.abs(distance), 0.7, 0.35, None),
                (rolling_rms(distance), 1.9, 1.0, label),
            ):
                shown = np.where(values > 0, values, np.nan)  # a gap where a logarithmic axis shows nothing
                axes.plot(
                    steps, shown, color=looks[label].colour, ls=looks[label].line, lw=width, alpha=alpha, label=name
                )
                sizes.append(values)
    spread = seed_spread(list(references.values()))
    if spread is not None:
        axes.plot(*spread, color=COLOURS["naive"], lw=2.4, label="spread between seeds")
        sizes.append(spread.values)
    if rounding := rounding_of_a_step(cell.runs, reference):
        floor = np.array([rounding, rounding * last])
        axes.plot([1, last], floor, color=COLOURS["muted"], ls=":", lw=1.4, label="rounding")
        sizes.append(floor)
    finish_steps(figure, axes, f"distance of the training loss from {reference}'s")
    positive = np.concatenate(sizes)
    if len(positive := positive[positive > 0]):
        log_axis(axes, max(EPS / 4, np.percentile(positive, 3) / 2), 2 * positive.max())
    else:
        axes.text(0.5, 0.5, "no difference at any step", transform=axes.transAxes, ha="center", color=COLOURS["ink"])
        axes.set_yticks([])


def draw_probe(figure: Figure, cell: Cell, reference: str) -> None:
    """Differences at the same weights in units of the reference's rounding, the worst seed at each step."""
    axes = figure.add_subplot()
    looks, every = styles(cell.labels()), [1.0]
    for label in cell.labels():
        for measure in MEASURES if label != reference else ():
            worst: dict[int, float] = {}
            for run in cell.of(label).values():
                for step, distance, noise in zip(*beside_rounding(run, measure), strict=True):
                    if np.isfinite(distance):
                        worst[int(step)] = max(worst.get(int(step), 0.0), distance / noise if noise > 0 else 0.0)
            gradients = measure == "grad_rel_err"
            axes.plot(
                sorted(worst), [worst[step] for step in sorted(worst)], color=looks[label].colour,
                ls=looks[label].line if gradients else ":", lw=1.8, marker=looks[label].marker,
                markersize=4.5 if gradients else 2.4, label=label if gradients and worst else None,
            )  # fmt: skip
            every += worst.values()
    log_axis(axes, 0.5 * min(0.2, *(value for value in every if value > 0)), 2 * max(8.0, *every))
    axes.axhspan(axes.get_ylim()[0], PARITY_MARGIN, color=COLOURS["band"], lw=0, zorder=0)
    axes.axhline(1, color=COLOURS["naive"], lw=1.4, zorder=1)
    finish_steps(figure, axes, f"difference, in units of {reference}'s rounding")


def draw_over_axis(
    figure: Figure,
    sweep: Sweep,
    dots: Dots,
    unit: str,
    log: bool = True,
    rings: Sequence[float] | None = None,
) -> None:
    """One measurement of every label over the sweep's axis.

    rings  where it crosses 1 on the axis
    """
    axes = figure.add_subplot()
    looks = styles(sweep.labels())
    for label, values in dots.items():
        look = looks[label]
        if values:
            axes.plot(
                *zip(*values, strict=True), color=look.colour, ls=look.line, marker=look.marker, markersize=4.8, lw=1.9,
                label=label, zorder=3,
            )  # fmt: skip
    for ring in rings or ():
        axes.plot(ring, 1, "o", color=COLOURS["surface"], mec=COLOURS["ink"], mew=1.3, ms=6, zorder=5)
        axes.annotate(f"{ring:,.0f}", (ring, 1), xytext=(6, -12), textcoords="offset points", color=COLOURS["ink"])
    if rings is not None:
        axes.axhline(1, color=COLOURS["naive"], lw=1.6, zorder=1)
    label_axes(axes, unit, "sequence length, tokens" if sweep.axis == "seq_len" else "devices")
    rows = _mark_out_of_memory(axes, sweep)
    room = 0.08 + 0.1 * rows  # no line ends among the words at the upper edge
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if log:
        log_axis(axes, low / 1.3, high * 1.3 * (high / low) ** room)
    else:
        axes.set_ylim(low - 0.1 * (high - low), high + (room + 0.05) * (high - low))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ticks = [sweep.position(cell) for cell in sweep.cells]
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xticks(ticks, [short_length(n) for n in ticks])
    axes.minorticks_off()
    legend(figure, axes)


def _mark_out_of_memory(axes: Axes, sweep: Sweep) -> int:
    """A cross on the upper edge at the first place that did not fit, in words and in the implementation's colour.

    Returns how many rows the words take.
    """
    looks, rows = styles(sweep.labels()), dict[int, int]()
    for label, of_label in points(sweep).items():
        failed = min((point.position for point in of_label if point.out_of_memory), default=None)
        if failed is not None:
            row = rows[failed] = rows.get(failed, -1) + 1
            axes.annotate(
                f"{label} out of memory ✕", (failed, 1), xycoords=("data", "axes fraction"), xytext=(4, -7 - 13 * row),
                textcoords="offset points", ha="right", va="center", color=looks[label].colour,
            )  # fmt: skip
    return max(rows.values(), default=-1) + 1
