"""Figures over steps: losses, their differences to the reference, and what the probe found."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from report.draw import Palette, dress, legend, log_axis, styles
from report.evidence import MARGIN, MEASURES, Array, Band, difference, seed_band
from report.groups import Group
from report.numbers import power_of_ten
from report.record import Run


def draw_loss(figure: Figure, palette: Palette, group: Group) -> None:
    """Training and validation loss over steps."""
    axes = figure.add_subplot()
    styled = styles(group.labels(), palette)
    shown: list[Array] = []
    named: set[str] = set()
    for label, run in _labelled_runs(group):
        style = styled[label]
        train, val = run.series("train/loss").finite(), run.series("val/loss").finite()
        thick = len(val) > 1  # else the training loss has to stand for both
        name = None if label in named else label
        axes.plot(
            train.steps, train.values, color=style.colour, ls=style.line, lw=0.9 if thick else style.width,
            alpha=0.3 if thick else 0.9, label=None if thick else name,
        )  # fmt: skip
        if thick:
            axes.plot(
                val.steps, val.values, color=style.colour, ls=style.line, lw=style.width, label=name,
                marker=style.marker if len(val) < 30 else None, markersize=style.width + 1.6,
            )  # fmt: skip
        named.add(label)
        # The start falls from the logarithm of the vocabulary and would flatten all the rest.
        shown.append(train.values[len(train) // 12 :])
    dress(axes, palette, "loss (nats a token)", "step")
    values = np.concatenate(shown)
    if len(values):
        margin = 0.06 * (values.max() - values.min()) + 1e-3
        axes.set_ylim(values.min() - margin, values.max() + margin)
    _step_axis(axes)
    legend(figure, axes, palette)


def draw_difference(figure: Figure, palette: Palette, group: Group, reference: str) -> None:
    """Training loss minus the reference's of the same seed, and the seeds' distance as a band."""
    axes = figure.add_subplot()
    references = group.of(reference)
    styled = styles(group.labels(), palette)
    sizes = [np.zeros(0)]
    named: set[str] = set()
    for label, run in _labelled_runs(group):
        if label == reference or run.seed not in references:
            continue
        apart = difference(run, references[run.seed])
        style = styled[label]
        axes.plot(
            apart.steps, apart.values, color=style.colour, ls=style.line, lw=1.2, alpha=0.85,
            label=None if label in named else label,
        )  # fmt: skip
        named.add(label)
        sizes.append(np.abs(apart.values))
    band = seed_band(list(references.values()))
    if band:
        axes.fill_between(
            band.train.steps, -band.train.values, band.train.values, color=palette["band"], lw=0, zorder=0,
            label=f"{reference}'s seeds",
        )  # fmt: skip
    axes.axhline(0, color=palette["naive"], lw=1.2, zorder=1)
    dress(axes, palette, f"training loss, minus {reference}'s", "step")
    _symmetric_log_axis(axes, np.concatenate(sizes), band)
    _step_axis(axes)
    legend(figure, axes, palette)


def draw_probe(figure: Figure, palette: Palette, group: Group, reference: str) -> None:
    """The probe's differences in units of the reference's own rounding, of the worst seed."""
    axes = figure.add_subplot()
    styled = styles(group.labels(), palette)
    every = [np.ones(1)]
    for label in group.labels():
        if label == reference:
            continue
        for measure in MEASURES:
            worst = _worst_shares(list(group.of(label).values()), measure)
            if not worst:
                continue
            steps, shares = zip(*sorted(worst.items()), strict=True)
            gradients = measure == "grad_rel_err"
            axes.plot(
                steps, shares, color=styled[label].colour, ls=styled[label].line if gradients else ":", lw=1.6,
                marker=styled[label].marker, markersize=4 if gradients else 2.2, label=label if gradients else None,
            )  # fmt: skip
            every.append(np.array(shares))
    values = np.concatenate(every)
    values = values[np.isfinite(values) & (values > 0)]
    log_axis(axes, 0.5 * min(0.2, float(values.min())), 2 * max(8.0, float(values.max())))
    axes.axhspan(axes.get_ylim()[0], MARGIN, color=palette["band"], lw=0, zorder=0)
    axes.axhline(1, color=palette["naive"], lw=1.2, zorder=1)
    dress(axes, palette, f"difference, in units of {reference}'s rounding", "step")
    _step_axis(axes)
    legend(figure, axes, palette)


def _worst_shares(runs: list[Run], measure: str) -> dict[int, float]:
    """Difference over noise at each step that was probed, the largest over the runs."""
    worst: dict[int, float] = {}
    for run in runs:
        apart, noise = run.series(f"parity/{measure}").finite(), run.series(f"parity/noise_{measure}").finite()
        steps, here, there = np.intersect1d(apart.steps, noise.steps, return_indices=True)
        for step, a, b in zip(steps, apart.values[here], noise.values[there], strict=True):
            if b > 0:
                worst[int(step)] = max(worst.get(int(step), 0.0), float(a / b))
    return worst


def _symmetric_log_axis(axes: Axes, sizes: Array, band: Band | None) -> None:
    """Linear up to where the differences begin, logarithmic beyond, with four labels a side at most."""
    positive = sizes[sizes > 0]
    smallest = float(np.percentile(positive, 10)) if len(positive) else 1e-7
    largest = max([smallest, *sizes[-1:], *([float(sizes.max())] if len(sizes) else [])])
    if band:
        largest = max(largest, float(band.train.values.max()))
    low = int(np.floor(np.log10(max(smallest, 1e-9))))
    high = max(low + 1, int(np.ceil(np.log10(largest))))
    stride = -(-(high - low) // 3)
    ticks = [10.0**power for power in range(high, low - 1, -stride)]
    axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.6)
    axes.yaxis.set_major_locator(FixedLocator([*(-tick for tick in ticks), 0, *reversed(ticks)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_ten(value)))
    axes.set_ylim(-(10.0**high) * 1.3, 10.0**high * 1.3)


def _labelled_runs(group: Group) -> list[tuple[str, Run]]:
    return [(label, run) for label in group.labels() for run in group.of(label).values()]


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.03)
