"""The benchmark of training steps: the overrides it gives train.py, and the rows and tables made of the results."""

from __future__ import annotations

from typing import Any

import pytest

from bench.nanogpt import SHAPES
from bench.record import Recorder, Row, read
from bench.train_step import ATTENTIONS, IDENTITY, column, main, measure_all, overrides, table
from recipe.run import compose


def row(attention: str, shape: str = "32x1024", dropout: float = 0.0, speed: float = 600_000, **other: Any) -> Row:
    measured: Row = {"status": "completed", "message": None, "tokens_per_s": speed, "peak_allocated_gib": 11.0}
    cell = {"attention": attention, "shape": shape, "dropout": dropout, "extra": []}
    return cell | measured | {"mfu_causal": 0.5} | other


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_cell_is_a_command_that_train_accepts(attention):
    for number, shape in enumerate(SHAPES):
        dropout = 0.1 * (number % 2)
        config = compose.to_config(compose.composed(overrides(attention, shape, dropout, 60)))
        assert config.training.batch_size * config.seq_len == 32_768
        assert (config.attention.name, config.attention.dropout) == (attention, dropout)
        assert config.training.steps == 60


def test_the_table_has_each_kind_of_step_beside_nanogpts_of_the_same_shape_and_rate() -> None:
    theirs: list[Row] = [
        {"shape": shape, "dropout": dropout, "status": "completed", "tokens_per_s": 500_000, "peak_allocated_gib": 21.9}
        for shape in ("32x1024", "16x2048") for dropout in (0.0, 0.1)
    ]  # fmt: skip
    steps = [
        row("sdpa", "4x8192", status="out_of_memory"), row("flash", dropout=0.1, speed=1.0), row("flash"),
        row("flash", extra=["training.compile=false"], speed=610_400),
    ]  # fmt: skip
    assert table(steps, theirs, 0.0).splitlines() == [
        "| dropout 0: thousand tokens/s (GiB) | nanoGPT | flash | flash compile=false | sdpa |",
        "| --- | --- | --- | --- | --- |",
        "| 32 x 1,024 | 500 (21.9) | 600 (11.0) | 610 (11.0) | |",
        "| 4 x 8,192 | | | | out of memory |",
    ]


@pytest.fixture
def measuring(tmp_path):
    """Run the benchmark on synthetic measurements: {attention: row} -> exit status and rows by name."""

    def run(cells: dict[str, Row], *extra: str) -> tuple[int, dict[str, Row]]:
        path = tmp_path / "train-step.json"
        wanted = [row(attention, extra=list(extra)) for attention in cells]
        recorder = Recorder(path, IDENTITY, {"device": "some", "versions": {}, "sizes": {}})
        status = measure_all(wanted, recorder, lambda cell: cell | cells[cell["attention"]])
        return status, {column(r): r for r in read(path)}

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


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "32by1024"], "32by1024 is not a batch size and a sequence length, such as 32x1024"),
        (["--shapes", "32x0"], "32x0 is not a batch size"),
        (["--dropout", "2"], "attention.dropout=2"),
        (["--steps", "0"], "0 is not a whole number above 0"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err
