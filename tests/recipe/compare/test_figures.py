"""The content of the figures, read from their axes."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recipe.compare.figures import charts
from recipe.compare.parity import judge
from recipe.drawing import _RC, COLOURS, WIDTH, Chart, styles
from tests.recipe.compare.reading import only_sweep
from tests.recipe.compare.synthetic import write_run, write_runs


def charts_of(folder: Path) -> dict[str, Chart]:
    sweep = only_sweep(folder)
    return {chart.name: chart for chart in charts(sweep, judge(sweep.cells))}


@pytest.fixture
def figure():
    """An empty figure with the report's width and fonts."""
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(WIDTH, 3), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def test_no_line_runs_into_the_words_that_memory_ran_out(tmp_path, figure):
    for attention, longest in {"naive": 4096, "flash": 8192}.items():
        for seq_len in (1024, 2048, 4096, 8192, 16384):
            ended: dict[str, Any] = {"status": "out_of_memory", "stop": 0} if seq_len > longest else {}
            peak = 2 + (seq_len / 1024) ** 2 if attention == "naive" else 2 + seq_len / 1024
            run = tmp_path / f"{attention}-{seq_len}"
            write_run(run, attention, steps=10, seq_len=seq_len, batch_size=1, peak_gib=peak, **ended)
    charts_of(tmp_path)["memory"].draw(figure)
    figure.canvas.draw()
    (axes,) = figure.axes
    words = [text.get_window_extent() for text in axes.texts if "out of memory" in text.get_text()]
    assert len(words) == 2
    for line in axes.lines:
        drawn = axes.transData.transform(line.get_xydata())
        assert all(y < min(word.y0 for word in words) for _, y in drawn), "a line runs into the words"


def test_the_runs_of_every_setting_and_implementation_are_drawn(tmp_path, figure):
    for lr in (1e-3, 3e-3):
        write_runs(tmp_path / f"{lr}", steps=50, overrides={"optimizer.lr": lr})
    charts_of(tmp_path)["loss"].draw(figure)
    (legend,) = figure.legends
    names = {text.get_text() for text in legend.get_texts()}
    assert names == {"naive lr=0.001", "flash lr=0.001", "naive lr=0.003", "flash lr=0.003"}


def test_the_distance_is_drawn_beside_the_spread_between_seeds_and_the_rounding(tmp_path, figure):
    write_runs(tmp_path, seeds=(1, 2), precision="fp32")
    charts_of(tmp_path)["difference"].draw(figure)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    lines = {str(line.get_label()): np.nanmax(line.get_ydata()) for line in axes.lines}
    assert lines["flash"] < lines["rounding"] < lines["spread between seeds"]
    assert min(line.get_linewidth() for line in axes.lines if line.get_label() == "flash") > 1.5


def test_no_two_labels_look_the_same():
    labels = ["naive", "tiled 16x16", "tiled 32x32", "tiled 64x64", "flash", "lr=1", "lr=2", "lr=3"]
    looks = [(style.colour, style.line) for style in styles(labels).values()]
    assert len(set(looks)) == len(labels)
    assert looks[0][0] == COLOURS["naive"]


def test_runs_that_logged_a_single_loss_have_no_curve(tmp_path):
    write_run(tmp_path / "0", status="failed", stop=1, steps=20, probe_every=0)
    assert charts_of(tmp_path) == {}
