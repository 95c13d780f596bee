"""Figures of runs: losses over steps and their differences, costs over the sequence length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from recipe.compare.costs import SPEED, Point, attention_alone, crossovers, points
from recipe.compare.parity import EPS, MEASURES, beside_rounding, rolling_rms, rounding_of_a_step, seed_spread
from recipe.compare.probes import Curves, probe_charts
from recipe.compare.sweeps import Cell, Sweep, difference
from recipe.compare.verdict import Outcome, Verdict
from recipe.drawing import COLOURS, Chart, finish_steps, label_axes, legend, log_axis, styles
from recipe.training.parity import PARITY_MARGIN
from recipe.wording import memory_unit, short_length

Dots = Mapping[str, Sequence[tuple[int, float]]]  # the name of a line, and its points


def charts(sweep: Sweep, verdicts: Sequence[Verdict], reference: str = "naive", prefix: str = "") -> list[Chart]:
    """The figures of a sweep.

    verdicts  of its cells; the parity of the worst is drawn
    prefix    of the files' names, where several sweeps stand on a page
    """
    curves = {
        _name(label, cell, sweep): list(cell.of(label).values()) for cell in sweep.cells for label in cell.labels()
    }
    result = loss_charts(curves, coincide=len(sweep.cells) == 1)
    if judged := [verdict for verdict in verdicts if verdict.agreements]:
        worst = max(judged, key=lambda v: (v.outcome is Outcome.broken, v.probe.ratio if v.probe else 0.0)).cell
        where = f", {worst.short}" if len(sweep.cells) > 1 else ""
        result += _parity_charts([verdict for verdict in judged if verdict.cell is worst], worst, reference, where)
    result += probe_charts(curves)
    if sweep.over_lengths:
        result += _length_charts(sweep, reference)
    return [replace(chart, name=prefix + chart.name) for chart in result]


def _name(label: str, cell: Cell, sweep: Sweep) -> str:
    """A curve's name: the implementation, the setting, or both where a sweep has several of both."""
    if len(sweep.cells) == 1:
        return label
    return f"{label} {cell.short}" if len(sweep.labels()) > 1 else cell.short


def loss_charts(curves: Curves, coincide: bool = False) -> list[Chart]:
    """The training loss over steps of any runs, by name; nothing where no run has two losses.

    coincide  whether the curves should be equal
    """
    shown = {  # a curve needs two points
        label: runs
        for label, runs in curves.items()
        if any(len(run.series("train/loss").finite().steps) > 1 for run in runs)
    }
    caption = f"{next(iter(shown))} is the wide line below the others. " if len(shown) > 1 and coincide else ""
    if any(len(run.series("val/loss").steps) > 1 for runs in shown.values() for run in runs):
        caption += "Marks are the validation loss."
    draw = partial(draw_losses, curves=shown, coincide=coincide)
    return [Chart("loss", "Training loss", caption, draw)] if shown else []


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
        margin = 0.06 * np.ptp(values) + 1e-3
        axes.set_ylim(values.min() - margin, values.max() + margin)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))  # they may differ in the fourth digit
    finish_steps(figure, axes, "loss, nats per token")


def _parity_charts(judged: Sequence[Verdict], cell: Cell, reference: str, where: str) -> list[Chart]:
    result = []
    if any(verdict.curve and verdict.curve.largest for verdict in judged):
        caption = f"Training loss against {reference}'s of the same seed, by step (thin) and over a tenth of the run."
        draw = partial(draw_difference, cell=cell, reference=reference)
        result.append(Chart("difference", f"Distance from {reference}{where}", caption, draw))
    if any(verdict.probe for verdict in judged):
        caption = (
            f"Gradients (lines) and logits (dots) against {reference}'s on the same weights, batch and masks, worst "
            f"seed. Rounding alone gives about 1. Up to {PARITY_MARGIN:g} is accepted (shaded)."
        )
        draw = partial(draw_probe, cell=cell, reference=reference)
        result.append(Chart("probe", f"At the same weights{where}", caption, draw))
    return result


def draw_difference(figure: Figure, cell: Cell, reference: str) -> None:
    """|training loss - the reference's of the same seed|, with the spread between its seeds and its rounding."""
    axes = figure.add_subplot()
    references, looks = cell.of(reference), styles(cell.labels())
    sizes, last = [], 1
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
    if spread := seed_spread(list(references.values())):
        axes.plot(*spread, color=COLOURS["naive"], lw=2.4, label="spread between seeds")
        sizes.append(spread.values)
    if rounding := rounding_of_a_step(cell.runs, reference):
        floor = np.array([rounding, rounding * last])
        axes.plot([1, last], floor, color=COLOURS["muted"], ls=":", lw=1.4, label="rounding")
        sizes.append(floor)
    finish_steps(figure, axes, f"distance of the training loss from {reference}'s")
    positive = np.concatenate(sizes)
    positive = positive[positive > 0]
    log_axis(axes, max(EPS / 4, np.percentile(positive, 3) / 2), 2 * positive.max())


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


def _length_charts(sweep: Sweep, reference: str) -> list[Chart]:
    table, result = points(sweep), list[Chart]()

    def add(name: str, title: str, caption: str, unit: str, value: Callable[[Point], float | None]) -> None:
        dots = {label: [(p.position, y) for p in its if (y := value(p)) is not None] for label, its in table.items()}
        if any(dots.values()):
            result.append(Chart(name, title, caption, partial(draw_over_lengths, sweep=sweep, dots=dots, unit=unit)))

    if crossovers(sweep, reference):
        theirs = {point.position: point.median("throughput/step_ms") for point in table[reference]}

        def gain(point: Point) -> float | None:
            other, ours = theirs.get(point.position), point.median("throughput/step_ms")
            return other / ours if other and ours and point.label != reference else None

        caption = f"Step time of {reference} over that of each implementation, which overtakes it at 1."
        add("crossover", f"Speed relative to {reference}", caption, f"times as fast as {reference}", gain)
    alone = attention_alone(sweep.runs)
    unit, factor = memory_unit([point.memory_gib for its in table.values() for point in its])
    caption = "Of the attention's tensors, not of the process." if alone else "Of the device's allocator."
    title = "Memory of one attention layer" if alone else "Peak memory"
    add("memory", title, caption, unit, lambda p: p.memory_gib and factor * p.memory_gib)
    add("throughput", "Throughput", "Median over the run.", "tokens per second", lambda p: p.median(SPEED))
    if any(run.out_of_memory for run in sweep.runs):
        result.sort(key=lambda chart: chart.name != "memory")
    return result


def draw_over_lengths(figure: Figure, sweep: Sweep, dots: Dots, unit: str) -> None:
    """One measurement of every label over the lengths, with a line at 1 for ratios."""
    axes = figure.add_subplot()
    looks = styles(sweep.labels())
    for label, values in dots.items():
        look = looks[label]
        if values:
            axes.plot(
                *zip(*values, strict=True), color=look.colour, ls=look.line, marker=look.marker, markersize=4.8, lw=1.9,
                label=label, zorder=3,
            )  # fmt: skip
    if unit.startswith("times"):
        axes.axhline(1, color=COLOURS["naive"], lw=1.6, zorder=1)
    label_axes(axes, unit, "sequence length, tokens")
    room = 0.08 + 0.1 * _mark_out_of_memory(axes, sweep)  # no line ends among the words at the upper edge
    low, high = axes.dataLim.y0, axes.dataLim.y1
    log_axis(axes, low / 1.3, high * 1.3 * (high / low) ** room)
    ticks = [sweep.position(cell) for cell in sweep.cells]
    axes.set_xscale("log", base=2)
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    ticks = ticks[:: -(-len(ticks) // 8)]
    axes.set_xticks(ticks, map(short_length, ticks))
    axes.minorticks_off()
    legend(figure, axes)


def _mark_out_of_memory(axes: Axes, sweep: Sweep) -> int:
    """A cross on the upper edge at the first place that did not fit, in words and in the implementation's colour.

    Returns how many rows the words take.
    """
    looks, rows = styles(sweep.labels()), dict[int, int]()
    for label, of_label in points(sweep).items():
        failed = min((point.position for point in of_label if not point.measured), default=None)
        if failed is not None:
            row = rows[failed] = rows.get(failed, -1) + 1
            axes.annotate(
                f"{label} out of memory ✕", (failed, 1), xycoords=("data", "axes fraction"), xytext=(4, -7 - 13 * row),
                textcoords="offset points", ha="right", va="center", color=looks[label].colour,
            )  # fmt: skip
    return max(rows.values(), default=-1) + 1
