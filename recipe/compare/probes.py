"""Figures of the probes after training: accuracy by length and distance."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from recipe.compare.runs import Run
from recipe.drawing import COLOURS, Chart, label_axes, render_png
from recipe.files import number
from recipe.wording import percent, short_length

Curves = Mapping[str, Sequence[Run]]  # the name of a curve, and its seeds
Heat = NDArray[np.float64]  # (lengths, distances), NaN where nothing was asked
ROW, HEAD = 0.27, 0.36  # inches of a length, and of the name above a map
FIGURES = "probes"  # the folder of a run's own figures


def probe_charts(curves: Curves) -> list[Chart]:
    """A heat map for each task; nothing where no run has one."""
    names = dict.fromkeys(name for runs in curves.values() for run in runs for name in run.recorded("probes"))
    return [chart for name in names if (chart := _heat_chart(curves, name))]


def _sound(runs: Sequence[Run], name: str) -> list[dict[str, Any]]:
    """What the runs recorded of a probe, with the accuracy over lengths and distances as arrays, NaN for null. A run
    whose record is damaged is left out."""
    found = []
    for run in runs:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            details = run.recorded("probes")[name]
            arrays = {field: np.array(details[field], np.float64) for field in ("accuracy", "lengths", "distances")}
            shape = len(arrays["lengths"]), len(arrays["distances"])
            if all(shape) and arrays["accuracy"].shape == shape and not any(np.isinf(x).any() for x in arrays.values()):
                found.append({**details, **arrays})
    return found


def _heat_chart(curves: Curves, name: str) -> Chart | None:
    recorded = {label: _sound(runs, name) for label, runs in curves.items()}
    maps = {  # the mean over the seeds, of those with the lengths of the first
        label: np.mean([x["accuracy"] for x in details if np.array_equal(x["lengths"], details[0]["lengths"])], 0)
        for label, details in recorded.items()
        if details
    }
    if not maps:
        return None
    widest = max((d for details in recorded.values() for d in details), key=lambda d: len(d["lengths"]))
    caption = (
        "Right answers in percent, means over the seeds, by the distance to the token that decides the answer: from "
        f"the number below to the next. Guessing gives {percent(number(widest.get('chance')))}. The first row is the "
        "trained length; learned positions have no others."
    )
    draw = partial(draw_heat, maps=maps, lengths=widest["lengths"], distances=widest["distances"])
    height = 0.35 + sum(HEAD + ROW * len(heat) for heat in maps.values())
    return Chart(f"recall-{name}", f"Recall by length and distance: {name}", caption, draw, height)


def draw_heat(figure: Figure, maps: Mapping[str, Heat], lengths: Sequence[int], distances: Sequence[int]) -> None:
    """One map below the other: a row for each length, a column for each range of distances."""
    every = figure.subplots(
        len(maps), 1, sharex=True, squeeze=False, height_ratios=[len(heat) for heat in maps.values()]
    )[:, 0]
    for axes, (name, heat) in zip(every, maps.items(), strict=True):
        label_axes(axes, name)
        axes.set_title(name, loc="left", color=COLOURS["ink"], pad=4)
        axes.grid(visible=False)
        for (row, column), value in np.ndenumerate(heat):
            if np.isnan(value):
                continue
            axes.add_patch(
                Rectangle(
                    (column - 0.48, row - 0.46), 0.96, 0.92, facecolor=COLOURS["flash"], alpha=0.06 + 0.84 * value, lw=0
                )
            )
            ink = COLOURS["surface"] if value > 0.55 else COLOURS["ink"]
            axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", color=ink, fontsize=8.5)
        axes.set_yticks(range(len(heat)), map(short_length, lengths[: len(heat)]))
        axes.set_ylim(len(heat) - 0.5, -0.5)
    every[-1].set_xlim(-0.5, len(distances) - 0.5)
    every[-1].set_xticks(range(len(distances)), map(short_length, distances))
    every[-1].set_xlabel("tokens back", color=COLOURS["muted"], loc="right")


def draw_probes(folder: Path, measured: Mapping[str, Mapping[str, Any]]) -> list[Path]:
    """Write the figures of one run's probes into <folder>/probes/.

    measured  the details of each probe, by its name
    """
    run = Run(folder, folder.name, "completed", {}, [], {"probes": measured}, ())
    written = []
    for chart in probe_charts({folder.resolve().name: [run]}):
        path = folder / FIGURES / f"{chart.name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(render_png(chart))
        written.append(path)
    return written
