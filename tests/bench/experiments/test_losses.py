"""README's first figure and the sentence below it."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench.experiments.losses import WINDOW, chart, distance, largest_share, runs
from bench.record import RESULTS, read
from recipe.drawing import scheme

ROWS = read(RESULTS / "losses-nvidia-h200.json")


def test_the_distance_is_the_mean_of_the_last_differences():
    losses = {(row["case"]["attention"], row["case"]["seed"]): dict(row["losses"]) for row in ROWS}
    flash, naive = losses["flash", 1], losses["naive", 1]
    of_runs = runs(ROWS)
    found = dict(distance(of_runs["flash"], of_runs["naive"]).tolist())
    assert sorted(found) == list(range(WINDOW, 301))
    for step in (WINDOW, 150, 300):
        last = [abs(flash[n] - naive[n]) for n in range(step - WINDOW + 1, step + 1)]
        assert found[step] == pytest.approx(sum(last) / WINDOW)


def test_flash_is_drawn_closer_to_naive_than_another_seed_at_every_step():
    figure = Figure()
    chart(ROWS).draw(figure, scheme(dark=False))
    seed, flash = (np.asarray(line.get_ydata(), float) for line in figure.axes[1].get_lines())
    assert (flash < seed).all()
    assert largest_share(*(runs(ROWS)[name] for name in ("flash", "naive", "another seed"))) <= 1 / 7  # as README says
