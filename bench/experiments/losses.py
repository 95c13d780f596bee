"""Figures of two ways' losses, and their distance beside two seeds' distance: flash and naive in README, and fp8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.record import Row
from recipe.drawing import Chart, Palette, label_axes, legend, log_axis

WINDOW = 10  # steps that one point averages

Losses = NDArray[np.float64]  # (steps, 2): step, loss


def runs(rows: Sequence[Row], kind: str = "attention", names: Sequence[str] = ("naive", "flash")) -> dict[str, Losses]:
    """The training losses of a figure's three runs, by name: the two values of a case's `kind`, and another seed."""
    losses = {(row["case"][kind], row["case"]["seed"]): np.array(row["losses"]) for row in rows if "losses" in row}
    reference, other = names
    return {reference: losses[reference, 1], other: losses[other, 1], "another seed": losses[reference, 2]}


def smooth(run: Losses) -> Losses:
    """The mean of the last WINDOW losses at each step."""
    return np.column_stack([run[WINDOW - 1 :, 0], np.convolve(run[:, 1], np.ones(WINDOW) / WINDOW, mode="valid")])


def distance(run: Losses, reference: Losses) -> Losses:
    """The mean of the last WINDOW absolute differences of two runs' losses, at each step."""
    return smooth(np.column_stack([run[:, 0], np.abs(run[:, 1] - reference[:, 1])]))


def largest_share(run: Losses, reference: Losses, another_seed: Losses) -> float:
    """A run's largest distance from the reference, in units of another seed's distance at that step."""
    return float((distance(run, reference)[:, 1] / distance(another_seed, reference)[:, 1]).max())


def draw(figure: Figure, palette: Palette, runs: Mapping[str, Losses]) -> None:
    """The losses on the left; on the right the distances on a logarithmic axis."""
    (reference, naive), (name, flash), (_, seed) = runs.items()
    another: dict[str, Any] = {"color": palette["other-1"], "lw": 1.2, "zorder": 1.5}
    curves, distances = figure.subplots(1, 2)
    curves.plot(*smooth(naive).T, color=palette["naive"], lw=4.5, label=reference)
    curves.plot(*smooth(flash).T, color=palette["flash"], lw=1.6, label=f"{name}, same seed")
    curves.plot(*smooth(seed).T, label=f"{reference}, another seed", **another)
    curves.set_ylim(2.5, 6)
    label_axes(curves, palette, "training loss", "step")
    distances.plot(*distance(seed, naive).T, **another)
    distances.plot(*distance(flash, naive).T, color=palette["flash"], lw=1.6)
    log_axis(distances, 1e-5, 10.0)
    label_axes(distances, palette, f"distance from {reference}", "step")
    legend(figure, curves, palette)


def chart(rows: Sequence[Row]) -> Chart:
    """README's first figure."""
    return Chart("losses", "Training losses of flash and naive with dropout", "", partial(draw, runs=runs(rows)))
