"""README's first figure: the losses of flash and naive with dropout, and their distance next to that of two seeds.

    python -m bench.losses_figure        # docs/images/losses.png and losses-dark.png

It is drawn from bench/results/losses-nvidia-h200.json, which names the overrides, software and commit of each run.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench.measure import RESULTS, ROOT
from recipe.drawing import Chart, Palette, label_axes, legend, log_axis, render_png

LOSSES = RESULTS / "losses-nvidia-h200.json"
IMAGES = ROOT / "docs" / "images"
WINDOW = 10  # steps that one point averages

Losses = NDArray[np.float64]  # (steps, 2): step, loss


def read(path: Path) -> dict[str, Losses]:
    """The training losses of each run in the file, by its name."""
    return {run["name"]: np.array(run["train/loss"]) for run in json.loads(path.read_text())["runs"]}


def smooth(run: Losses) -> Losses:
    """The mean of the last WINDOW losses at each step."""
    return np.column_stack([run[WINDOW - 1 :, 0], np.convolve(run[:, 1], np.ones(WINDOW) / WINDOW, mode="valid")])


def distance(run: Losses, reference: Losses) -> Losses:
    """The mean of the last WINDOW absolute differences of two runs' losses, at each step."""
    return smooth(np.column_stack([run[:, 0], np.abs(run[:, 1] - reference[:, 1])]))


def draw(figure: Figure, palette: Palette, runs: dict[str, Losses]) -> None:
    """The losses on the left; on the right the distances on a logarithmic axis."""
    naive, flash, seed = (runs[f"drop-{name}"] for name in ("naive-1", "flash-1", "naive-2"))
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


def main(folder: Path = IMAGES) -> None:
    """Draw both colour schemes and print the largest distance in units of the seeds'."""
    runs = read(LOSSES)
    chart = Chart("losses", "Training losses of flash and naive with dropout", "", partial(draw, runs=runs))
    for dark, name in ((False, "losses.png"), (True, "losses-dark.png")):
        (folder / name).write_bytes(render_png(chart, dark))
        print(folder / name)
    naive, flash, seed = (runs[f"drop-{name}"] for name in ("naive-1", "flash-1", "naive-2"))
    share = distance(flash, naive)[:, 1] / distance(seed, naive)[:, 1]
    print(f"flash's distance from naive, in units of the other seed's: at most {share.max():.3g}")


if __name__ == "__main__":
    main()
