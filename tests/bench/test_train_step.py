"""The benchmark of training steps: the overrides it gives train.py, and the rows and figures made of the results."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from bench import nanogpt
from bench.measure import RESULTS
from bench.train_step import (
    ATTENTIONS,
    SHAPES,
    Row,
    column,
    draw,
    key,
    length,
    main,
    measure_all,
    nanogpt_beside,
    overrides,
    publish,
    table,
)
from recipe.cli import compose
from recipe.config import register
from recipe.drawing import scheme
from recipe.sweeps import launcher

NANOGPT = nanogpt.read(RESULTS, "NVIDIA H200")


def row(attention: str, shape: str = "32x1024", dropout: float = 0.0, speed: float = 600_000, **other: Any) -> Row:
    measured: Row = {"status": "completed", "message": None, "tokens_per_s": speed, "peak_allocated_gib": 11.0}
    measured |= {"versions": {"torch": "2.11.0"}}
    cell = {"attention": attention, "shape": shape, "dropout": dropout, "recompute": "none", "extra": []}
    return cell | measured | {"mfu_causal": 0.5, "device": "NVIDIA H200"} | other


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_cell_is_a_command_that_train_accepts(attention, dropout):
    register()
    launcher.register()
    for shape in SHAPES:
        config = compose.to_config(compose.composed(overrides(attention, shape, dropout, "block", 60)))
        assert config.training.batch_size * config.seq_len == 32_768
        assert (config.attention.name, config.attention.dropout) == (attention, dropout)
        assert (config.training.steps, config.training.recompute.value) == (60, "block")


def test_the_table_sets_implementations_beside_nanogpt():
    oom: Row = {"status": "out_of_memory", "tokens_per_s": None, "peak_allocated_gib": None}
    rows = [
        row("flash", speed=771_000),
        row("naive", speed=200_000),
        row("flash", "4x8192", 0.1),
        row("naive", "4x8192", 0.1, **oom),
        row("flash", speed=800_000, extra=["training.residual_in_fp32=false"], peak_allocated_gib=9.5),
        row("flash", speed=3_000_000, gpus=4),
    ]
    head, rule, *lines = [[c.strip() for c in line.split("|")[1:-1]] for line in table(rows, NANOGPT).splitlines()[2:]]
    assert set(rule) == {"---"}
    assert dict(zip(head, lines[0], strict=True)) == {
        "batch x seq_len": "32 x 1024",
        "dropout": "0",
        "recompute": "none",
        "nanoGPT": "514,000 (21.3)",
        "flash": "771,000 (11.0)",
        "flash on 4 GPUs": "3,000,000 (11.0)",
        "flash residual_in_fp32=false": "800,000 (9.5)",
        "naive": "200,000 (11.0)",
        "flash / nanoGPT": "1.50",
        "MFU of flash": "50 %",
    }
    assert lines[1][head.index("naive")] == "out of memory"
    assert len(lines) == 2


def test_nanogpts_figures_stand_only_beside_those_of_its_own_gpu():
    assert nanogpt_beside([row("flash")]) == NANOGPT
    assert nanogpt_beside([row("flash", device="NVIDIA A100-SXM4-80GB")]) == {}


def test_results_are_figures_too(tmp_path):
    path = tmp_path / "results" / "train_step-x.json"
    rows = [row(attention, f"{32768 // T}x{T}", speed=1e9 / T) for attention in ATTENTIONS for T in (1024, 8192)]
    publish(rows, path)
    assert sorted(json.loads(path.read_text()), key=key) == sorted(rows, key=key)
    assert {p.name for p in path.parent.iterdir()} == {"train_step-x.json", "train_step-x-dropout-0.png"}


@pytest.mark.parametrize("given", ["score.window=1024", "data.documents=mask"])
def test_steps_that_see_other_keys_are_in_no_figure(tmp_path, given):
    publish([row("flash", extra=[given])], tmp_path / "x.json")
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_equal_speeds_are_drawn_at_the_same_height(dropout):
    """nanoGPT's and ours, on axes in thousands of tokens per second."""
    theirs = [r for r in NANOGPT.values() if r["dropout"] == dropout]
    figure = Figure()
    draw(figure, scheme(dark=False), [row("flash", r["shape"], dropout, r["tokens_per_s"]) for r in theirs], theirs)
    lines = figure.axes[0].get_lines()
    assert len(lines) == 2
    for line in lines:
        assert np.asarray(line.get_xdata()).tolist() == sorted(length(r) for r in theirs)
        assert line.get_ydata() == pytest.approx(sorted((r["tokens_per_s"] / 1000 for r in theirs), reverse=True))


def test_results_measured_apart_are_drawn_together(tmp_path):
    first, second, joined = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "joined"
    publish([row("flash", speed=1.0), row("naive", speed=2.0)], first)
    publish([row("flash", speed=3.0), row("sdpa", status="failed", message="killed")], second)
    main(["--plot-only", str(first), str(second), "--results", str(joined)])
    found = {
        r["attention"]: r["tokens_per_s"] for r in json.loads((joined / "train_step-nvidia-h200.json").read_text())
    }
    assert (found["flash"], found["naive"]) == (3.0, 2.0)
    assert "sdpa" in found
    assert (joined / "train_step-nvidia-h200-dropout-0.png").exists()


def test_results_of_two_devices_are_not_drawn_together(tmp_path, capsys):
    publish([row("flash"), row("naive", device="NVIDIA A100")], tmp_path / "mixed.json")
    with pytest.raises(SystemExit):
        main(["--plot-only", str(tmp_path / "mixed.json"), "--results", str(tmp_path / "joined")])
    assert "one device, not of NVIDIA A100, NVIDIA H200" in capsys.readouterr().err
    assert not (tmp_path / "joined").exists()


def test_a_figure_that_fails_leaves_the_measurements(tmp_path):
    (tmp_path / "x-dropout-0.png").mkdir()
    with pytest.raises(IsADirectoryError):
        publish([row("flash")], tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == [row("flash")]


@pytest.fixture
def measuring(tmp_path):
    """Run the benchmark on synthetic measurements: {attention: row} -> exit status and rows by name."""

    def run(cells: dict[str, Row], *extra: str) -> tuple[int, dict[str, Row]]:
        path = tmp_path / "train_step.json"
        wanted = [row(attention, extra=list(extra)) for attention in cells]
        status = measure_all(wanted, path, lambda cell: cell | cells[cell["attention"]])
        return status, {column(r): r for r in json.loads(path.read_text())}

    return run


def speeds(rows: dict[str, Row]) -> dict[str, float]:
    return {name: r["tokens_per_s"] for name, r in rows.items()}


def test_measuring_a_cell_again_replaces_it_alone(measuring):
    measuring({"flash": {"tokens_per_s": 1.0}, "sdpa": {"tokens_per_s": 2.0}})
    status, rows = measuring({"flash": {"tokens_per_s": 3.0}})
    assert (status, speeds(rows)) == (0, {"flash": 3.0, "sdpa": 2.0})


def test_a_profiled_step_is_slower_and_replaces_no_other(measuring):
    measuring({"flash": {"tokens_per_s": 2.0}})
    _, rows = measuring({"flash": {"tokens_per_s": 1.0}}, "training.profile=true")
    assert speeds(rows) == {"flash": 2.0, "flash profile=true": 1.0}


def test_a_failure_is_reported_and_keeps_earlier_measurements(measuring, capsys):
    measuring({"flash": {"tokens_per_s": 1.0}})
    status, rows = measuring({"flash": {"status": "failed", "message": "killed"}, "sdpa": {"tokens_per_s": 2.0}})
    assert (status, speeds(rows)) == (1, {"flash": 1.0, "sdpa": 2.0})
    assert "killed" in capsys.readouterr().out


def test_measurements_of_other_software_do_not_stand_beside_these(measuring):
    measuring({"flash": {"tokens_per_s": 1.0}})
    _, rows = measuring({"sdpa": {"tokens_per_s": 2.0, "versions": {"torch": "2.12.0"}}})
    assert speeds(rows) == {"sdpa": 2.0}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "32by1024"], "32by1024 is not a batch size and a sequence length, such as 32x1024"),
        (["--shapes", "32x0"], "32x0 is not a batch size"),
        (["--dropout", "2"], "attention.dropout=2"),
        (["--steps", "0"], "0 is not a whole number above 0"),
        (["--plot-only", "nowhere.json"], "there is no file nowhere.json"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


def test_nanogpts_figures_stand_only_beside_steps_of_as_many_tokens():
    assert "514,000" not in table([row("flash", "64x1024")], NANOGPT)
