"""The values that TensorBoard reads from a run, before and after it was resumed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipe.run.config import Config
from recipe.run.mistakes import mistakes
from recipe.run.tracker import Tracker, TrackingConfig, TrackingMode

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
BOARD = TrackingConfig(mode=TrackingMode.tensorboard)


def read(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def log(run: Path, steps: range, loss: float, resume_step: int | None = None, finish: bool = False) -> None:
    with Tracker(run, BOARD, run_config={"seed": 1}, steps=40, resume_step=resume_step) as track:
        for step in steps:
            track.log(step, {"train/loss": loss, "parity/worst_parameter": "wte.weight"})
        if finish:
            track.log(steps[-1], {"val/loss": math.inf})
            track.finish({"status": "completed"})


def test_a_resumed_run_has_each_step_once_under_the_same_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(tmp_path, range(0, 31, 10), 1.0)
    assert read(tmp_path) == {"train/loss": [(step, 1.0) for step in (0, 10, 20, 30)]}
    log(tmp_path, range(30, 41, 10), 2.0, resume_step=20, finish=True)
    expected = [(0, 1.0), (10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]
    assert read(tmp_path) == {"train/loss": expected, "val/loss": [(40, math.inf)]}
    assert f"TensorBoard tensorboard --logdir {tmp_path}" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_starts_again_drops_what_a_killed_one_left(tmp_path: Path) -> None:
    log(tmp_path, range(0, 21, 10), 1.0)
    (tmp_path / "metrics.jsonl").unlink()
    log(tmp_path, range(0, 11, 10), 3.0)
    assert read(tmp_path) == {"train/loss": [(0, 3.0), (10, 3.0)]}


def test_without_the_package_it_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (said,) = mistakes(Config(device="cpu", tracking=BOARD))
    assert said == "tracking=tensorboard needs TensorBoard; install it with: pip install -e '.[tensorboard]'"
