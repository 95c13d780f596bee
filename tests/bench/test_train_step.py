"""The benchmark of training steps: what it asks train.py for, and what it makes of the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

import cli
from bench import train_step
from bench.train_step import ATTENTIONS, NANOGPT, SHAPES, Row, key, main, overrides, publish, table
from config import register
from training import launcher


def row(attention: str, shape: str = "32x1024", dropout: float = 0.0, speed: float = 600_000, **other: Any) -> Row:
    measured = {"status": "completed", "message": None, "tokens_per_s": speed, "peak_allocated_gib": 11.0}
    cell = {"attention": attention, "shape": shape, "dropout": dropout, "recompute": "none", "extra": []}
    return cell | measured | {"mfu_causal": 0.5, "device": "NVIDIA H200"} | other


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_every_cell_is_a_command_that_train_accepts(attention, dropout):
    register()
    launcher.register()
    for shape in SHAPES:
        config = cli.to_config(cli.composed(overrides(attention, shape, dropout, "block", 60, profile=True)))
        assert config.training.batch_size * config.seq_len == 32_768
        assert (config.attention.name, config.attention.dropout) == (attention, dropout)
        assert config.training.profile


def test_the_table_sets_implementations_beside_nanogpt():
    oom: Row = {"status": "out_of_memory", "tokens_per_s": None, "peak_allocated_gib": None}
    rows = [
        row("flash", speed=771_000),
        row("naive", speed=200_000),
        row("flash", "4x8192", 0.1),
        row("naive", "4x8192", 0.1, **oom),
    ]
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "32 x 1024", "0", "none", "514,000", "771,000", "200,000", "1.50", "50 %", "11.0"
    ]  # fmt: skip
    assert "out of memory" in lines[3]


def test_nanogpts_figures_stand_only_beside_those_of_its_own_gpu():
    assert "514,000" not in table([row("flash", device="NVIDIA A100-SXM4-80GB")])


def test_results_are_figures_too(tmp_path):
    path = tmp_path / "results" / "train_step-x.json"
    rows = [row(attention, f"{32768 // T}x{T}", speed=1e9 / T) for attention in ATTENTIONS for T in NANOGPT]
    publish(rows, path)
    assert sorted(json.loads(path.read_text()), key=key) == sorted(rows, key=key)
    assert {p.name for p in path.parent.iterdir()} == {
        "train_step-x.json", "train_step-x-dropout-0.png", "train_step-x-dropout-0.svg"
    }  # fmt: skip


def test_measuring_a_cell_again_replaces_it_alone(tmp_path, monkeypatch, capsys):
    speeds = iter((1.0, 2.0, 3.0))

    def measure(cell: Row, steps: int, profile: bool) -> Row:
        return row(cell["attention"], cell["shape"], cell["dropout"], next(speeds))

    monkeypatch.setattr(train_step, "measure", measure)
    common = ["--results", str(tmp_path), "--shapes", "32x1024", "--dropout", "0", "--attention"]
    main([*common, "flash", "sdpa"])
    main([*common, "flash"])
    (path,) = tmp_path.glob("*.json")
    assert {r["attention"]: r["tokens_per_s"] for r in json.loads(path.read_text())} == {"flash": 3.0, "sdpa": 2.0}
