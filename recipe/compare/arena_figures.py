"""Figures of an arena: the differences with their intervals, over the run, the learning rates, and the costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from recipe.compare.arena_results import Arena, Comparison, difference_curves
from recipe.compare.costs import attention_alone
from recipe.compare.figures import loss_chart
from recipe.compare.probes import probe_charts
from recipe.compare.statistics import ALPHA, paired
from recipe.drawing import Chart, Palette, Style, finish_steps, height_for, label_axes, legend, styles
from recipe.wording import memory_unit, percent, short_number

ROW = 0.46  # inches of an arm
LOSS = "nats per token"
ATTENTION = "attention, ms"


def forest(arena: Arena) -> Chart:
    """The answer as a figure: the difference of each arm, with its interval."""
    baseline, margin = arena.plan.baseline, percent(arena.plan.margin)
    caption = (
        f"Final validation loss of each arm less {baseline}'s of the same seed: the mean, its 95 % interval (thick), "
        f"the interval that the verdict follows from (thin), and each seed (dots). Shaded: at most {margin}."
    )
    draw = partial(draw_forest, arena=arena)
    return Chart("forest", f"Difference from {baseline}", caption, draw, 1.15 + ROW * len(arena.comparisons))


def arena_charts(arena: Arena) -> list[Chart]:
    """The other figures."""
    result, names = [], list(arena.arms)
    if any(difference_curves(one)[0].size > 1 for one in arena.comparisons):
        caption = "Means over the seeds with pointwise 95 % intervals; below 0 the arm is ahead. Shaded: the margin."
        title = f"Difference from {arena.plan.baseline} over the run"
        result.append(Chart("difference", title, caption, partial(draw_differences, arena=arena), height_for(names)))
    curves = {name: list(arm.runs.values()) for name, arm in arena.arms.items() if arm.runs}
    result += loss_chart(curves)
    if any(arm.tried for arm in arena.arms.values()):
        caption = "On separate seeds. A ring marks the learning rate that an arm was judged with."
        draw = partial(draw_lr, arena=arena)
        result.append(Chart("lr-sweep", "Learning rates", caption, draw, height_for(names)))
    result += probe_charts(curves)
    panels = _cost_panels(arena)
    if panels:
        alone = attention_alone(list(arena.runs.values()))
        caption = "Medians of the runs; the lines span them."
        titles = [title for title, *_ in panels]
        if ATTENTION in titles:
            caption += " Attention: of all layers in a step, measured alone."
        if any(title.startswith("memory") for title in titles):
            caption += f" Memory: {'of one attention layer' if alone else 'the peak of the device'}."
        draw = partial(draw_costs, panels=panels, names=names)
        result.append(Chart("costs", "Speed and memory", caption, draw, 0.7 + 0.4 * len(names)))
    return result


def draw_forest(figure: Figure, palette: Palette, arena: Arena) -> None:
    """A row for each arm, the first on top."""
    axes = figure.add_subplot()
    looks = styles(list(arena.arms), palette)
    for row, comparison in enumerate(arena.comparisons):
        _draw_row(axes, palette, row, comparison, looks[comparison.arm.name])
    label_axes(axes, palette, "lower is better", f"validation loss less {arena.plan.baseline}'s, {LOSS}")
    axes.axvspan(-arena.comparisons[0].margin, arena.comparisons[0].margin, color=palette["band"], lw=0, zorder=0)
    axes.axvline(0, color=palette["naive"], lw=1.4, zorder=1)
    axes.set_yticks(range(len(arena.comparisons)), [comparison.arm.name for comparison in arena.comparisons])
    axes.set_ylim(len(arena.comparisons) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))


def _draw_row(axes: Axes, palette: Palette, row: int, comparison: Comparison, look: Style) -> None:
    finite = [value for value in comparison.differences.values() if math.isfinite(value)]
    axes.plot(finite, [row + 0.22] * len(finite), ls="", marker="o", ms=2.6, color=look.colour, alpha=0.6, zorder=2)
    if comparison.test is None or comparison.interval is None:
        axes.annotate(
            "no result", (0, row), xytext=(6, 0), textcoords="offset points", va="center", color=palette["muted"]
        )
        return
    axes.plot(comparison.interval, [row, row], color=look.colour, lw=1.3, zorder=3)
    axes.plot(comparison.test.interval(ALPHA), [row, row], color=look.colour, lw=3.6, zorder=3)
    axes.plot(comparison.test.mean, row, marker="D", ms=6.5, color=look.colour, mec=palette["surface"], mew=1, zorder=4)
    words = comparison.verdict.value
    if comparison.diverged:
        words += f", {len(comparison.diverged)} diverged"
    axes.annotate(
        f"{comparison.test.mean:+.4f}  {words}", (comparison.test.mean, row), xytext=(0, 9), textcoords="offset points",
        ha="center", color=palette["ink"], fontsize=8.5, zorder=5,
        bbox={"facecolor": palette["surface"], "edgecolor": "none", "pad": 0.5},
    )  # fmt: skip


def draw_differences(figure: Figure, palette: Palette, arena: Arena) -> None:
    """The mean difference of each arm over the steps, with a band."""
    axes = figure.add_subplot()
    looks, shown = styles(list(arena.arms), palette), [np.zeros(1)]
    for comparison in arena.comparisons:
        steps, values = difference_curves(comparison)
        if len(steps) < 2:
            continue
        look = looks[comparison.arm.name]
        axes.plot(steps, values.mean(0), color=look.colour, ls=look.line, lw=1.8, label=comparison.arm.name, zorder=3)
        bounds = paired(values.T).interval(ALPHA) if len(values) > 1 else (values[0], values[0])
        axes.fill_between(steps, *bounds, color=look.colour, alpha=0.2, lw=0, zorder=2)
        later = steps >= steps[-1] / 6  # early differences would flatten all the rest
        shown += [bound[later] for bound in bounds]
    margin = arena.comparisons[0].margin
    axes.axhspan(-margin, margin, color=palette["band"], lw=0, zorder=0)
    axes.axhline(0, color=palette["naive"], lw=1.4, zorder=1)
    values = np.concatenate([*shown, [-margin, margin]])
    room = 0.06 * np.ptp(values)
    axes.set_ylim(values.min() - room, values.max() + room)
    finish_steps(figure, axes, palette, f"validation loss less {arena.plan.baseline}'s, {LOSS}")


def draw_lr(figure: Figure, palette: Palette, arena: Arena) -> None:
    """The mean loss over the learning rates of each arm."""
    axes = figure.add_subplot()
    looks, ticks = styles(list(arena.arms), palette), set()
    for name, arm in arena.arms.items():
        known = [(tried.lr, tried.mean) for tried in arm.tried if math.isfinite(tried.mean)]
        if not known:
            continue
        ticks |= {lr for lr, _ in known}
        look = looks[name]
        axes.plot(*zip(*known, strict=True), color=look.colour, ls=look.line, lw=1.8, label=name, zorder=2)
        for tried in arm.tried:
            finite = [value for value in tried.losses if math.isfinite(value)]
            axes.plot([tried.lr] * len(finite), finite, ls="", marker=look.marker, ms=3, color=look.colour, zorder=3)
        best = [(lr, mean) for lr, mean in known if lr == arm.lr]
        axes.plot(*zip(*best, strict=True), marker="o", ms=9, ls="", mfc="none", mec=look.colour, mew=1.6, zorder=4)
    label_axes(axes, palette, f"validation loss, {LOSS}", "optimizer.lr")
    axes.set_xscale("log")
    axes.set_xticks(sorted(ticks), [f"{lr:g}" for lr in sorted(ticks)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08, y=0.1)
    legend(figure, axes, palette)


Panel = tuple[str, Mapping[str, Sequence[float]], Callable[[float], str]]


def _cost_panels(arena: Arena) -> list[Panel]:
    """The measured costs of the arms: for each a title, the values of each arm's runs, and the format of a value."""
    speed = {name: arm.over_seeds("throughput/tokens_per_s") for name, arm in arena.arms.items()}
    alone = {name: [arm.recorded("attention_ms")] for name, arm in arena.arms.items()}
    known = {name: [value for value in values if value is not None] for name, values in alone.items()}
    peaks = {name: [gib for run in arm.runs.values() if (gib := run.peak())] for name, arm in arena.arms.items()}
    unit, factor = memory_unit([gib for its in peaks.values() for gib in its])
    memory = {name: [factor * gib for gib in its] for name, its in peaks.items()}
    panels: list[Panel] = [
        ("tokens/s", speed, short_number),
        (ATTENTION, known, "{:.3g}".format),
        (f"memory, {unit}", memory, "{:.3g}".format),
    ]
    return [panel for panel in panels if any(panel[1].values())]


def draw_costs(figure: Figure, palette: Palette, panels: Sequence[Panel], names: Sequence[str]) -> None:
    """A panel for each cost, side by side, and a row for each arm."""
    looks = styles(names, palette)
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, values, words) in zip(every, panels, strict=True):
        for row, name in enumerate(names):
            if not (costs := values[name]):
                continue
            middle = statistics.median(costs)
            axes.plot([min(costs), max(costs)], [row, row], color=looks[name].colour, lw=2, zorder=2)
            axes.plot(middle, row, marker="o", ms=6, color=looks[name].colour, mec=palette["surface"], zorder=3)
            axes.annotate(
                words(middle), (middle, row), xytext=(0, 6), textcoords="offset points", ha="center",
                color=palette["ink"], fontsize=8.5,
            )  # fmt: skip
        label_axes(axes, palette, title)
        axes.set_xlim(0, 1.3 * max(max(costs) for costs in values.values() if costs))
        axes.set_xticks([])
    every[0].set_yticks(range(len(names)), list(names))
    every[0].set_ylim(len(names) - 0.5, -0.7)
