"""README's figure and the sentence below it."""

from __future__ import annotations

import json
import re

import pytest

from bench.losses_figure import LOSSES, WINDOW, distance, main, read


def test_the_distance_is_the_mean_of_the_last_differences():
    runs = {run["name"]: dict(run["train/loss"]) for run in json.loads(LOSSES.read_text())["runs"]}
    flash, naive = runs["drop-flash-1"], runs["drop-naive-1"]
    found = dict(distance(read(LOSSES)["drop-flash-1"], read(LOSSES)["drop-naive-1"]).tolist())
    assert sorted(found) == list(range(WINDOW, 301))
    for step in (WINDOW, 150, 300):
        last = [abs(flash[n] - naive[n]) for n in range(step - WINDOW + 1, step + 1)]
        assert found[step] == pytest.approx(sum(last) / WINDOW)


def test_both_schemes_are_drawn_and_flash_is_seven_times_closer_than_another_seed(tmp_path, capsys):
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"losses.png", "losses-dark.png"}
    (share,) = re.findall(r"at most ([\d.]+)", capsys.readouterr().out)
    assert float(share) <= 1 / 7  # as README says
