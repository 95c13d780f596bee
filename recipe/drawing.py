"""One drawing, two renderings: SVG for the page, and PNG. A dark page inverts the brightness of its figures."""

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from recipe.wording import short_number

# By role. An implementation looks the same in every figure.
COLOURS: dict[str, str] = {
    "surface": "#ffffff",
    "ink": "#1f2430",
    "muted": "#6a7180",
    "grid": "#e5e8ee",
    "band": "#eaedf3",
    "naive": "#7b8496",
    "tiled": "#d9822b",
    "sdpa": "#1f9a8a",
    "flash": "#5b5bd6",
    "flex": "#3f8f3a",
    "varlen": "#8b5a3c",
    "bad": "#cf3f3f",
    "other-0": "#2f6fd0",
    "other-1": "#b8327f",
    "other-2": "#0e8a9e",
    "other-3": "#7a4bc4",
    "other-4": "#96720c",
    "other-5": "#5a6980",
}
IMPLEMENTATIONS = ("naive", "tiled", "sdpa", "flash", "flex", "varlen")
OTHERS = sum(role.startswith("other-") for role in COLOURS)
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
# Inches at 72 to the inch make the units of the SVG: about a phone's width, so that 9.5 is a readable size there.
WIDTH, HEIGHT = 4.8, 3.2
SIZE = 9.5
LINES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.4, 1.2, 1.4)))
MARKERS = ("o", "s", "D", "^")

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": SIZE,
    "axes.titlesize": SIZE,
    "axes.linewidth": 0.8,
    "lines.solid_capstyle": "round",
    "legend.fontsize": SIZE,
    "path.simplify_threshold": 0.3,
    "text.parse_math": False,  # a label may hold dollars
}


class Style(NamedTuple):
    """The style of one label."""

    colour: str
    line: str | tuple[int, tuple[float, ...]]
    marker: str


@dataclass(frozen=True)
class Chart:
    """A figure to be drawn.

    name     of its files
    title    of the figure
    caption  how to read it, one or two sentences
    draw     draws it on an empty figure
    height   in inches, with one row of a legend
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Figure], None]
    height: float = HEIGHT


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """One style a label: an implementation looks the same in every figure; variants and all else follow in order."""
    styled: dict[str, Style] = {}
    others = 0
    for label in labels:
        role, line = label.split(" ")[0], LINES[0]
        if role not in IMPLEMENTATIONS or COLOURS[role] in [style.colour for style in styled.values()]:
            role, line = f"other-{others % OTHERS}", LINES[(others // OTHERS) % len(LINES)]
            others += 1
        styled[label] = Style(COLOURS[role], line, MARKERS[len(styled) % len(MARKERS)])
    return styled


def render_svg(chart: Chart) -> str:
    """An <svg> element with ids that no other figure has, on the background of the page."""
    text = io.StringIO()
    with mpl.rc_context(_RC):
        figure = _draw(chart, FigureCanvasSVG)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{chart.name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{chart.name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{chart.name}-\1"', svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page decides its size; the view box keeps its proportions.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(chart.title)}" ', 1)


def render_png(chart: Chart) -> bytes:
    """PNG at twice the size of a screen's pixels."""
    file = io.BytesIO()
    with mpl.rc_context(_RC):
        _draw(chart, FigureCanvasAgg).savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def _draw(chart: Chart, canvas: type[FigureCanvasAgg] | type[FigureCanvasSVG]) -> Figure:
    figure = Figure(figsize=(WIDTH, chart.height), layout="constrained", facecolor=COLOURS["surface"])
    canvas(figure)
    chart.draw(figure)
    return figure


def label_axes(axes: Axes, title: str, xlabel: str = "") -> None:
    """Give axes their title, label and look. The title takes the place of a y label, which would have to be rotated."""
    axes.set_facecolor(COLOURS["surface"])
    axes.set_title(title, loc="left", color=COLOURS["muted"], pad=7)
    axes.set_xlabel(xlabel, color=COLOURS["muted"], loc="right")
    axes.grid(color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["grid"])
    axes.tick_params(which="both", colors=COLOURS["muted"], length=0, labelcolor=COLOURS["ink"])


def legend(figure: Figure, axes: Axes) -> None:
    """All labels in rows above the axes, for which the figure grows."""
    named = {label: handle for handle, label in reversed(list(zip(*axes.get_legend_handles_labels(), strict=True)))}
    labels, handles = list(reversed(named)), list(reversed(named.values()))
    if not handles:
        return
    columns = legend_columns(labels)
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(labels) // columns) - 1))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, labelcolor=COLOURS["ink"],
        handlelength=1.6, handletextpad=0.5, columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip


def legend_columns(labels: Sequence[str]) -> int:
    """Number of columns that fit side by side, each as wide as its longest label."""
    for columns in range(min(5, len(labels)), 1, -1):
        longest = [max(map(len, column)) for column in np.array_split(labels, columns)]  # as matplotlib fills them
        if sum(0.63 * SIZE * characters + 3.6 * SIZE for characters in longest) <= 72 * WIDTH:
            return columns
    return 1


def log_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic y axis from `low` to `high` with ticks a reader says aloud: 1, 2, 5, or powers of ten alone."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def finish_steps(figure: Figure, axes: Axes, title: str) -> None:
    """Give axes over the steps of a run their title, ticks and legend."""
    label_axes(axes, title, "step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.margins(x=0.03)
    legend(figure, axes)
