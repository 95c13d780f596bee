"""What the figures show, read from their axes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from report.curve_figures import draw_probe
from report.draw import _RC, WIDTH, scheme
from report.figures import charts
from report.groups import Family, family_runs
from report.length_figures import draw_costs, draw_memory
from report.runs import find_runs
from report.scaling import points
from tests.report.synthetic import write_run

PALETTE = scheme(dark=False)


def only_family(folder: Path) -> Family:
    (family,) = family_runs(find_runs([folder]).runs)
    return family


@pytest.fixture
def figure() -> Iterator[Figure]:
    """Empty, of the report's width and with its fonts."""
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(WIDTH, 3), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def write_memory(folder: Path, fits: dict[str, int]) -> None:
    """2 GiB and so many T^2 or T, at lengths from 1k to 64k, for each implementation up to the length that fits."""
    for attention, longest in fits.items():
        for seq_len in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
            growing = (seq_len / 1024) ** 2 if attention == "naive" else seq_len / 1024
            ended: dict[str, Any] = {"status": "out_of_memory", "stop": 0} if seq_len > longest else {}
            run = folder / f"{attention}-{seq_len}"
            write_run(run, attention, steps=10, seq_len=seq_len, batch_size=1, peak_gib=2 + growing, **ended)
            if seq_len > longest:
                break


def dashed(figure: Figure) -> list[float]:
    """Where each prediction ends, in tokens."""
    (axes,) = figure.axes
    return [float(np.max(np.asarray(line.get_xdata()))) for line in axes.lines if line.get_linestyle() == "--"]


def test_a_prediction_ends_where_its_implementation_ran_out_of_memory(tmp_path: Path, figure: Figure) -> None:
    write_memory(tmp_path, {"naive": 16384, "flash": 32768})
    draw_memory(figure, PALETTE, only_family(tmp_path))
    assert dashed(figure) == [32768, 65536]
    figure.canvas.draw()
    (axes,) = figure.axes
    words = [text.get_window_extent() for text in axes.texts if "out of memory" in text.get_text()]
    assert len(words) == 2
    for line in axes.lines:
        points_drawn = axes.transData.transform(line.get_xydata())
        assert all(y < min(word.y0 for word in words) for _, y in points_drawn), "a line runs into the words"


def test_a_prediction_does_not_stretch_the_axis_beyond_ten_times_what_was_measured(
    tmp_path: Path, figure: Figure
) -> None:
    """naive was stopped at 4k, and would take 4,098 GiB at 64k."""
    write_memory(tmp_path, {"naive": 65536, "flash": 65536})
    for seq_len in (8192, 16384, 32768, 65536):
        run = tmp_path / f"naive-{seq_len}"
        (run / "summary.json").unlink()
        (run / "metrics.jsonl").write_text("")
    draw_memory(figure, PALETTE, only_family(tmp_path))
    assert figure.axes[0].get_ylim()[1] == pytest.approx(10 * (2 + 64))


def test_a_single_check_has_a_single_tick(tmp_path: Path, figure: Figure) -> None:
    write_run(tmp_path / "flash", "flash", steps=1, probe_every=1)
    (group,) = only_family(tmp_path).groups
    draw_probe(figure, PALETTE, group, "naive")
    figure.canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    shown = [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert shown == ["1"]


def test_the_titles_of_the_costs_fit_the_figure(tmp_path: Path, figure: Figure) -> None:
    for ablate in ("none", "no_max_subtraction"):
        write_run(tmp_path / ablate, "tiled", steps=50, overrides={"attention.ablate": ablate})
    every = [found[0] for found in points(only_family(tmp_path)).values()]
    draw_costs(figure, PALETTE, every, "one attention layer")
    figure.canvas.draw()
    for axes in figure.axes:
        (title,) = [text for text in axes.get_children() if getattr(text, "get_text", str)() == axes.get_title("left")]
        assert title.get_window_extent().x1 <= figure.bbox.x1


def test_the_caption_promises_validation_only_where_there_was_one(tmp_path: Path) -> None:
    write_run(tmp_path / "validated" / "naive", steps=100)
    write_run(tmp_path / "not" / "naive", steps=20)
    metrics = tmp_path / "not" / "naive" / "metrics.jsonl"
    metrics.write_text(
        "".join(line for line in metrics.open() if "val/loss" not in line) + '{"step": 5, "train/loss": 3}\n'
    )
    captions = [charts(only_family(tmp_path / name), [])[0].caption for name in ("validated", "not")]
    assert ["validation" in caption for caption in captions] == [True, False]
