"""Figures of the probes, from what runs recorded."""

from pathlib import Path
from typing import Any

import pytest

from recipe.compare.probes import probe_charts
from recipe.compare.runs import Run
from recipe.drawing import render_svg

MAP = {"chance": 0.25, "lengths": [8, 16], "distances": [1, 2, 4], "accuracy": [[1.0, 0.5, None], [0.75, 0.25, 0.0]]}
LOSS = {"trained": 8, "positions": [0, 3, 9], "loss": [3.0, 2.0, 1.0]}


def run(probes: dict[str, Any]) -> Run:
    return Run(Path(), "0", "completed", {}, [], {"probes": probes}, ())


def test_a_cell_is_the_mean_over_the_seeds_and_what_was_never_asked_is_empty():
    other = MAP | {"accuracy": [[0.5, 0.1, None], [0.75, 0.25, 0.0]]}
    (chart,) = probe_charts({"causal": [run({"mqar": MAP}), run({"mqar": other})]})
    cells = [text.split("</text>")[0].split(">")[-1] for text in render_svg(chart).split("<text")[1:]]
    assert [cell for cell in cells if cell in ("75", "30", "25", "0", "nan")] == ["75", "30", "75", "25", "0"]
    assert "Guessing gives 25 %" in chart.caption


def test_arms_without_longer_lengths_stand_beside_those_with_them():
    short = MAP | {"lengths": [8], "accuracy": [[1.0, 0.5, None]]}
    probes = {"learned": [run({"mqar": short, "position_loss": LOSS})], "rotary": [run({"mqar": MAP})]}
    (heat,) = probe_charts(probes)
    assert heat.name == "recall-mqar"
    assert all(f">{name}</text>" in render_svg(heat) for name in probes)


@pytest.mark.parametrize(
    "damage",
    [
        {"mqar": MAP | {"accuracy": [[1.0], [1.0, 0.5, 0.5]]}},
        {"mqar": MAP | {"accuracy": [["<b>", 0.5, 0.5], [1.0, 0.5, 0.5]]}},
        {"mqar": MAP | {"lengths": []}},
        {"mqar": MAP | {"accuracy": [[1e999, 0.5, 0.5], [1.0, 0.5, 0.5]]}},
        {"mqar": [1]},
    ],
)
def test_damaged_probes_are_left_out(damage):
    assert probe_charts({"causal": [run(damage)]}) == []
