"""One drawing, three renderings: SVG that follows the page's colour scheme, and PNG in light and in dark.

A figure is drawn in colours of a palette. In SVG each of them becomes a CSS variable with a value for either
scheme, so that one file serves both; PNG is drawn once with each column of the palette.
"""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from report.numbers import power_of_ten

# role: (light, dark). An implementation looks the same in every figure.
COLOURS: dict[str, tuple[str, str]] = {
    "surface": ("#ffffff", "#171a21"),
    "ink": ("#1f2430", "#e7e9ee"),
    "muted": ("#6a7180", "#9aa2b1"),
    "grid": ("#e5e8ee", "#2b303b"),
    "band": ("#eaedf3", "#262b36"),
    "naive": ("#7b8496", "#a7b0c2"),
    "tiled": ("#d9822b", "#f0a35a"),
    "sdpa": ("#1f9a8a", "#4fc9b7"),
    "flash": ("#5b5bd6", "#9a9bff"),
    "other": ("#b0408f", "#e27fc4"),
    "bad": ("#cf3f3f", "#ff7b7b"),
}
IMPLEMENTATIONS = ("naive", "tiled", "sdpa", "flash")
# Variants of an implementation (tile sizes, backends) keep near its hue: turns of the colour wheel, and lightness.
_TINTS = ((-0.035, -0.12), (0.045, 0.08), (-0.07, 0.06), (0.02, -0.2))


def _tint(colour: str, turn: float, lighter: float) -> str:
    red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    tinted = colorsys.hls_to_rgb((hue + turn) % 1, min(0.9, max(0.1, lightness + lighter)), saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in tinted)


for _name in (*IMPLEMENTATIONS, "other"):
    for _n, _shift in enumerate(_TINTS, start=1):
        COLOURS[f"{_name}-{_n}"] = (_tint(COLOURS[_name][0], *_shift), _tint(COLOURS[_name][1], *_shift))
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
# Inches at 72 to the inch make the units of the SVG: about a phone's width, so that 9.5 is a readable size there.
WIDTH, HEIGHT = 4.8, 3.2
SIZE = 9.5
LINES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.4, 1.2, 1.4)))
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
}

Palette = Mapping[str, str]


@dataclass(frozen=True)
class Style:
    """How one label is drawn: the colour of its implementation, and a dash and marker among its namesakes."""

    colour: str
    line: str | tuple[int, tuple[float, ...]]
    marker: str
    width: float


@dataclass(frozen=True)
class Chart:
    """A figure to be drawn.

    name     of its files
    title    what it shows
    caption  how to read it, one or two sentences
    draw     draws it on an empty figure in the palette's colours
    height   in inches
    """

    name: str
    title: str
    caption: str
    draw: Callable[[Figure, Palette], None]
    height: float = HEIGHT


def styles(labels: list[str], palette: Palette) -> dict[str, Style]:
    """One style a label. Lines grow thinner in order, so that curves that coincide all show."""
    namesakes: dict[str, int] = {}
    styled = {}
    for n, label in enumerate(labels):
        name = label.split(" ")[0]
        variant = namesakes[name] = namesakes.get(name, -1) + 1
        first = IMPLEMENTATIONS.index(name) if name in IMPLEMENTATIONS else len(IMPLEMENTATIONS)
        role = name if name in IMPLEMENTATIONS else "other"
        tint = (variant - 1) % len(_TINTS) + 1
        styled[label] = Style(
            palette[f"{role}-{tint}" if variant else role],
            LINES[variant % len(LINES)] if variant else LINES[0],
            MARKERS[(first + variant) % len(MARKERS)],
            max(1.2, 4.4 - 1.1 * n),
        )
    return styled


def scheme(dark: bool) -> Palette:
    """role -> colour, of one of the two schemes."""
    return {role: colours[dark] for role, colours in COLOURS.items()}


def css_variables(dark: bool) -> str:
    """The palette as CSS declarations."""
    return "".join(f"--{role}:{colour};" for role, colour in scheme(dark).items())


def render_svg(chart: Chart) -> str:
    """An <svg> element whose colours are the CSS variables of `css_variables`, with ids that no other figure has."""
    text = io.StringIO()
    with mpl.rc_context(_RC):
        figure = _draw(chart, scheme(dark=False), FigureCanvasSVG)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{chart.name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{chart.name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{chart.name}-\1"', svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Whoever places it decides its size; the view box keeps its proportions.
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%"', svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_attribute(chart.title)}" ', 1)


def standalone_svg(svg: str) -> str:
    """An SVG file that brings its colours along and follows the scheme of whoever shows it."""
    style = (
        f"<style>svg{{{css_variables(dark=False)}background:var(--surface)}}"
        f"@media (prefers-color-scheme: dark){{svg{{{css_variables(dark=True)}}}}}</style>"
    )
    end = svg.index(">") + 1
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:end]}{style}{svg[end:]}\n'


def render_png(chart: Chart, dark: bool) -> bytes:
    """PNG at twice the size of a screen's pixels."""
    file = io.BytesIO()
    with mpl.rc_context(_RC):
        figure = _draw(chart, scheme(dark), FigureCanvasAgg)
        figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def _draw(chart: Chart, palette: Palette, canvas: type[FigureCanvasAgg] | type[FigureCanvasSVG]) -> Figure:
    figure = Figure(figsize=(WIDTH, chart.height), layout="constrained", facecolor=palette["surface"])
    canvas(figure)
    chart.draw(figure, palette)
    return figure


def dress(axes: Axes, palette: Palette, title: str, xlabel: str = "") -> None:
    """The look that all axes share; the title stands in for a label of the y axis, to be read without turning."""
    axes.set_facecolor(palette["surface"])
    axes.set_title(title, loc="left", color=palette["muted"], pad=7)
    axes.set_xlabel(xlabel, color=palette["muted"], loc="right")
    axes.grid(color=palette["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(palette["grid"])
    axes.tick_params(which="both", colors=palette["muted"], length=0, labelcolor=palette["ink"])


def legend(figure: Figure, axes: Axes, palette: Palette) -> None:
    """All labels in rows above the axes."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    columns = legend_columns(labels)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, labelcolor=palette["ink"],
        handlelength=1.6, handletextpad=0.5, columnspacing=1.4, borderaxespad=0.2,
    )  # fmt: skip


def short_length(n: float) -> str:
    """1024 -> 1k, 524288 -> 512k, 1000 -> 1,000"""
    return f"{int(n) // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n:,.0f}"


def legend_columns(labels: Sequence[str]) -> int:
    """How many columns fit beside each other, each as wide as its longest label."""
    for columns in range(min(5, len(labels)), 1, -1):
        longest = [max(map(len, column)) for column in np.array_split(labels, columns)]  # as matplotlib fills them
        if sum(0.63 * SIZE * characters + 3.6 * SIZE for characters in longest) <= 72 * WIDTH:
            return columns
    return 1


def height_for(labels: Sequence[str]) -> float:
    """Inches for a figure whose legend names all labels, in as many rows as it takes."""
    return HEIGHT + 0.2 * (-(-len(labels) // legend_columns(labels)) - 1)


def log_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic y axis from `low` to `high` with ticks a reader says aloud: 1, 2, 5, or powers of ten alone."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    steps = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=steps, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))


def short_number(value: float) -> str:
    """1500000 -> 1.5M, 40000 -> 40k, 0.05 -> 0.05, 1e-6 -> 10⁻⁶"""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}" if size >= 1e-2 else power_of_ten(value)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
