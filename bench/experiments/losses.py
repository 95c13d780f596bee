"""README's first figure: the losses of flash and naive with dropout, and their distance beside two seeds' distance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.record import Row
from recipe.drawing import Chart, Palette, label_axes, legend, log_axis

WINDOW = 10  # steps that one point averages

Losses = NDArray[np.float64]  # (steps, 2): step, loss


def runs(rows: Sequence[Row]) -> dict[str, Losses]:
    """The training losses of the figure's three runs, by name."""
    losses = {(row["case"]["attention"], row["case"]["seed"]): np.array(row["losses"]) for row in rows}
    return {"naive": losses["naive", 1], "flash": losses["flash", 1], "another seed": losses["naive", 2]}


def smooth(run: Losses) -> Losses:
    """The mean of the last WINDOW losses at each step."""
    return np.column_stack([run[WINDOW - 1 :, 0], np.convolve(run[:, 1], np.ones(WINDOW) / WINDOW, mode="valid")])


def distance(run: Losses, reference: Losses) -> Losses:
    """The mean of the last WINDOW absolute differences of two runs' losses, at each step."""
    return smooth(np.column_stack([run[:, 0], np.abs(run[:, 1] - reference[:, 1])]))


def largest_share(run: Losses, reference: Losses, another_seed: Losses) -> float:
    """A run's largest distance from the reference, in units of another seed's distance at that step."""
    return float((distance(run, reference)[:, 1] / distance(another_seed, reference)[:, 1]).max())


def draw(figure: Figure, palette: Palette, rows: Sequence[Row]) -> None:
    """The losses on the left; on the right the distances on a logarithmic axis."""
    naive, flash, seed = runs(rows).values()
    another: dict[str, Any] = {"color": palette["other-1"], "lw": 1.2, "zorder": 1.5}
    curves, distances = figure.subplots(1, 2)
    curves.plot(*smooth(naive).T, color=palette["naive"], lw=4.5, label="naive")
    curves.plot(*smooth(flash).T, color=palette["flash"], lw=1.6, label="flash, same seed")
    curves.plot(*smooth(seed).T, label="naive, another seed", **another)
    curves.set_ylim(2.5, 6)
    label_axes(curves, palette, "training loss", "step")
    distances.plot(*distance(seed, naive).T, **another)
    distances.plot(*distance(flash, naive).T, color=palette["flash"], lw=1.6)
    log_axis(distances, 1e-5, 10.0)
    label_axes(distances, palette, "distance from naive", "step")
    legend(figure, curves, palette)


def chart(rows: Sequence[Row]) -> Chart:
    """The figure."""
    return Chart("losses", "Training losses of flash and naive with dropout", "", partial(draw, rows=rows))
