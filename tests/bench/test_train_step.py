"""The benchmark of training steps: the overrides it gives train.py, and the rows and tables made of the results."""

from typing import Any

import pytest

from bench.nanogpt import SHAPES
from bench.record import Recorder, Row, read
from bench.train_step import ATTENTIONS, IDENTITY, column, main, measure_all, overrides, table
from recipe.run import compose


def row(attention, shape="32x1024", dropout=0.0, speed=600_000, **other: Any):
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


def test_the_table_has_each_kind_of_step_beside_nanogpts_of_the_same_shape_and_rate():
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


def test_measuring_again_replaces_a_cell_alone_and_a_failure_keeps_earlier_rows(tmp_path, capsys):
    def measured(cells, *extra):
        """The exit status, and tokens/s by the name of the column."""
        recorder = Recorder(tmp_path / "t.json", IDENTITY, {"device": "some", "versions": {}, "sizes": {}})
        asked = [row(attention, extra=list(extra)) for attention in cells]
        status = measure_all(asked, recorder, lambda cell: cell | cells[cell["attention"]])
        return status, {column(r): r["tokens_per_s"] for r in read(recorder.path)}

    measured({"flash": {"tokens_per_s": 1.0}, "sdpa": {"tokens_per_s": 2.0}})
    assert measured({"flash": {"tokens_per_s": 3.0}}) == (0, {"flash": 3.0, "sdpa": 2.0})
    profiled = {"flash": 3.0, "sdpa": 2.0, "flash profile=true": 1.0}  # slower, and replaces no other
    assert measured({"flash": {"tokens_per_s": 1.0}}, "training.profile=true") == (0, profiled)
    failed: dict[str, Row] = {"flash": {"status": "failed", "message": "killed"}, "sdpa": {"tokens_per_s": 4.0}}
    assert measured(failed) == (1, profiled | {"sdpa": 4.0})
    assert "killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "32by1024"], "32by1024 is not a batch size and a sequence length, such as 32x1024"),
        (["--dropout", "2"], "attention.dropout=2"),
        (["--steps", "0"], "0 is not a whole number above 0"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err
