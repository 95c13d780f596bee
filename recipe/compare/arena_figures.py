"""Figures of an arena: the differences with their intervals, and those of any runs."""

from __future__ import annotations

import math
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from recipe.compare.arena_results import Arena
from recipe.compare.figures import loss_charts
from recipe.compare.probes import probe_charts
from recipe.compare.statistics import ALPHA
from recipe.compare.tables import EQUAL, signed
from recipe.drawing import COLOURS, Chart, label_axes, styles

ROW = 0.46  # inches of an arm
LOSS = "nats per token"


def forest(arena: Arena) -> Chart:
    """The answer as a figure: the difference of each arm, with its interval."""
    baseline = arena.plan.baseline
    caption = (
        f"Final {_unit(arena)[0]} of each arm less {baseline}'s of the same seed: the mean, its 95 % interval (thick), "
        f"the interval that the verdict follows from (thin), and each seed (dots). Shaded: the margin."
    )
    draw = partial(draw_forest, arena=arena)
    return Chart("forest", f"Difference from {baseline}", caption, draw, 1.15 + ROW * len(arena.comparisons))


def arena_charts(arena: Arena) -> list[Chart]:
    """The other figures."""
    curves = {name: list(arm.runs.values()) for name, arm in arena.arms.items() if arm.runs}
    return loss_charts(curves) + probe_charts(curves)


def _unit(arena: Arena) -> tuple[str, str]:
    """What is judged, and its unit."""
    return ("wrong answers", "share") if arena.task else ("validation loss", LOSS)


def draw_forest(figure: Figure, arena: Arena) -> None:
    """A row for each arm, the first on top."""
    axes, looks = figure.add_subplot(), styles(list(arena.arms))
    for row, comparison in enumerate(arena.comparisons):
        colour = looks[comparison.arm.name].colour
        finite = [value for value in comparison.differences.values() if math.isfinite(value)]
        axes.plot(finite, [row + 0.22] * len(finite), ls="", marker="o", ms=2.6, color=colour, alpha=0.6, zorder=2)
        test = comparison.test
        if test is None or comparison.interval is None:
            continue
        axes.plot(comparison.interval, [row, row], color=colour, lw=1.3, zorder=3)
        axes.plot(test.interval(ALPHA), [row, row], color=colour, lw=3.6, zorder=3)
        axes.plot(test.mean, row, marker="D", ms=6.5, color=colour, mec=COLOURS["surface"], mew=1, zorder=4)
        words = EQUAL if comparison.equal else f"{signed(test.mean)}  {comparison.verdict.value}"
        if comparison.diverged:
            words += f", {len(comparison.diverged)} diverged"
        axes.annotate(
            words, (test.mean, row), xytext=(0, 9), textcoords="offset points",
            ha="center", color=COLOURS["ink"], fontsize=8.5, zorder=5,
            bbox={"facecolor": COLOURS["surface"], "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    label_axes(axes, "lower is better", f"{_unit(arena)[0]} less {arena.plan.baseline}'s, {_unit(arena)[1]}")
    axes.axvspan(-arena.comparisons[0].margin, arena.comparisons[0].margin, color=COLOURS["band"], lw=0, zorder=0)
    axes.axvline(0, color=COLOURS["naive"], lw=1.4, zorder=1)
    axes.set_yticks(range(len(arena.comparisons)), [comparison.arm.name for comparison in arena.comparisons])
    axes.set_ylim(len(arena.comparisons) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
