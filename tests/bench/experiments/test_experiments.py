"""The runs of the documents are commands that train.py accepts, and their rows are what train.py recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.experiments.__main__ import main, measure
from bench.experiments.cases import EXPERIMENTS, Run
from bench.experiments.sources import sources
from bench.runs import recorded, train
from recipe.run import compose

TINY = (
    "device=cpu data=text data.tokenizer=bytes seq_len=32 model.n_layers=1 model.n_heads=2 model.n_embd=16 "
    "model.positions=rotary schedule=constant schedule.warmup_steps=0 training.batch_size=2 training.batch_tokens=128 "
    "training.eval_every=6 training.eval_batches=2 training.sample_tokens=0 tracking=disabled "
    "training.log_every=1 training.steps=6"
)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_train_accepts_every_run_and_no_two_share_a_case(name):
    runs = list(EXPERIMENTS[name]())
    for run in runs:
        overrides = run.overrides.replace("<sources>", "sources").split()
        config = compose.to_config(compose.composed(overrides))
        for option, value in run.case.items():
            if option in ("attention", "score", "optimizer") and " " not in str(value):
                assert getattr(config, option).name == value
            if option in ("seed", "seq_len"):
                assert getattr(config, option) == value
        if run.then:
            compose.to_config(compose.composed([*overrides, *run.then.split()]))
    assert len({json.dumps(run.case) for run in runs}) == len(runs)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 200)
    return f"data.path={path} data.cache={tmp_path / 'cache'}"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_run_in_two_parts_is_measured_as_one_and_evaluated_in_windows(text, tmp_path):
    run = Run({"run": "long"}, f"{TINY} {text}", then="seq_len=64 training.steps=12", windows=(64,), losses=True)
    row = measure(run, ["seed=3"], tmp_path / "run")
    assert (row["status"], row["step"], row["case"]) == ("completed", 12, {"run": "long"})
    assert row["overrides"][-1] == "seed=3"
    assert row["tokens"] == 12 * 128
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert row["val_loss"] == summary["val_loss"]
    assert [step for step, _ in row["evaluations"]] == [0, 6, 12]
    assert [found["seq_len"] for found in row["whole_validation"]] == [64]
    assert row["training_s"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_run_that_train_refuses_has_its_message(tmp_path):
    row = train(["device=cpu", "training.steps=0"], tmp_path / "run")
    assert row["status"] == "failed"
    assert "training.steps=0 must be at least 1" in row["message"]


def test_a_model_that_does_not_fit_into_memory_is_a_result(tmp_path):
    (tmp_path / "summary.json").write_text('{"status": "out_of_memory", "message": "too large", "step": 0}')
    assert recorded(tmp_path) == {"status": "out_of_memory", "message": "too large", "step": 0}


def test_losses_that_are_not_finite_are_left_out(tmp_path):
    (tmp_path / "summary.json").write_text('{"status": "failed", "step": 2, "non_finite_step": 2}')
    values: list[float | str] = [3.5, "nan"]
    lines = [{"step": n, "train/loss": value, "throughput/elapsed_s": 0.5} for n, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row = recorded(tmp_path)
    assert (row["losses"], row["non_finite_step"]) == ([[1, 3.5]], 2)


def test_an_experiment_without_such_a_run_says_so(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["default", "--only", "nonsense"])
    assert "no run of default has a case with nonsense" in capsys.readouterr().err


def test_the_text_of_sources_has_every_file_of_the_packages(tmp_path, monkeypatch):
    for name, files in {"one": ["__init__", "a"], "two": ["__init__"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / f"{file}.py").write_text(f"# {name} {file}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("bench.experiments.sources.PACKAGES", ("one", "two", "not_installed"))
    found = {path.read_text() for path in sources(tmp_path / "cache").iterdir()}
    assert found == {"# one __init__", "# one a", "# two __init__"}
