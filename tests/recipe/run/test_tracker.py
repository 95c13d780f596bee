"""A run's records are right, and survive kills, resumes and full disks."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench.machine import ROOT
from recipe.compare.runs import read_run
from recipe.run.metrics import MetricsFile, TrackingError, read_metrics
from recipe.run.progress import ProgressLine
from recipe.run.summary import draw_loss_curve, git, git_state, write_summary
from recipe.run.tracker import Tracker, TrackingConfig, TrackingMode
from tests.composing import as_it_is
from tests.limits import files_limited_to
from tests.recipe.training.test_checkpoint import before_each_operation

DISABLED = TrackingConfig(mode=TrackingMode.disabled)


def strict(line: str) -> dict[str, Any]:
    """Parse JSON without Python's extensions."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def track(folder: Path, resume_step: int | None = None) -> Tracker:
    return Tracker(folder, DISABLED, recorded={}, steps=100, resume_step=resume_step)


def log_steps(file: MetricsFile, count: int) -> None:
    for step in range(count):
        file.append(step, {"train/loss": 1.0})


def test_a_line_is_in_the_file_as_soon_as_it_is_logged_and_strict_json(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(1, {"a": float("nan"), "b": torch.tensor(-float("inf")), "c": None, "d": torch.tensor(3), "e": "word"})
    record = strict((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 1, "a": "nan", "b": "-inf", "c": None, "d": 3, "e": "word"}
    with pytest.raises(ValueError, match="step 0 is logged after step 1"):
        file.append(0, {})


def test_a_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (0, 10, 20, 30):
        file.append(step, {"train/loss": 1.0})
        file.append(step, {"val/loss": 2.0})
    with path.open("a") as killed:
        killed.write('{"step": 40, "train/lo')

    MetricsFile(path, resume_step=20).append(30, {"train/loss": 3.0})
    lines = [strict(line) for line in path.read_text().splitlines()]
    assert lines == [
        *({"step": step, "train/loss": 1.0, "val/loss": 2.0} for step in (0, 10, 20)),
        {"step": 30, "train/loss": 3.0},
    ]


def test_a_kill_while_a_run_is_resumed_keeps_its_lines(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    log_steps(MetricsFile(path), 30)
    copies = before_each_operation(path.parent, tmp_path / "copies", lambda: MetricsFile(path, resume_step=20))
    assert len(copies) > 3
    for copy in copies:
        assert [record["step"] for record in read_metrics(copy / path.name)][:21] == [*range(21)]


def test_damaged_lines_are_named_and_put_aside_when_a_run_is_resumed(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 2}\n[1]\n{"a": 2}\nnull\n{"step": 3}\n{"step": 4, "tr')
    (tmp_path / "summary.json").touch()
    for _ in range(2):
        with track(tmp_path, resume_step=3):
            assert not (tmp_path / "summary.json").exists(), "it describes a run that has ended"
    assert [strict(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}, {"step": 3}]
    damaged = (tmp_path / "metrics.damaged.jsonl").read_bytes()
    assert damaged == b'\xff\xfe\n[1]\n{"a": 2}\nnull\n', "half a last line is not damage"
    assert capsys.readouterr().out.count("warning: these lines of") == 1
    (note,) = [note for note in read_run(tmp_path).notes if "could not be read" in note]
    assert note.endswith("they are in metrics.damaged.jsonl.")


def test_a_new_run_does_not_mix_with_an_older_one(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {})
    with pytest.raises(TrackingError, match=rf"resume={tmp_path}.*hydra\.run\.dir"):
        track(tmp_path)


def test_a_file_that_a_full_disk_cuts_off_can_be_resumed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    with files_limited_to(1000), pytest.raises(OSError, match=r"File too large|No space left"):
        log_steps(file, 100)
    whole = len(read_metrics(path))
    assert whole > 10
    MetricsFile(path, resume_step=99).append(99, {})
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [*range(whole), 99]


def test_a_finished_run_leaves_its_records_and_says_where(tmp_path, capsys):
    folder = tmp_path / "2026-11-20" / "12-00-00-naive"
    with track(folder) as tracker, as_it_is():
        for step in (50, 100):
            tracker.log(step, {"train/loss": 2.0, "val/loss": 2.5})
        tracker.finish({"status": "completed", "val_loss": float("nan")})
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "summary.json", "loss.png"}
    assert (folder / "loss.png").stat().st_size > 10_000
    assert strict((folder / "summary.json").read_text()) == {"status": "completed", "val_loss": "nan"}
    last = capsys.readouterr().out.splitlines()[-3:]
    assert last[0].split() == ["run", "folder", str(folder)]
    assert "metrics.jsonl" in last[1]
    assert "loss.png" in last[2]


def test_a_summary_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"status": "interrupted"})
    with files_limited_to(10), pytest.raises(OSError, match="File too large"):
        write_summary(path, {"status": "completed"})
    assert strict(path.read_text()) == {"status": "interrupted"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_git_state_is_commit_and_whether_files_differ_from_it(tmp_path):
    assert git_state(tmp_path / "nowhere") == {"commit": None, "dirty": None, "changes": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@x", "commit", "-q", "-m", "first")
    assert git_state(tmp_path) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False, "changes": None}
    digests = set()
    # git does not know rows.py, and the last content is not UTF-8.
    for name, content in (("file", b"b"), ("rows.py", b"1"), ("rows.py", b"2"), ("file", b"d\xe9j\xe0")):
        (tmp_path / name).write_bytes(content)
        state = git_state(tmp_path)
        assert state["dirty"]
        digests.add(state["changes"])
    assert len(digests) == 4
    assert None not in digests


def test_the_loss_curve_is_drawn_whatever_the_losses(tmp_path):
    draw_loss_curve([], tmp_path / "empty.png", "empty")
    records = [{"step": s, "train/loss": "inf" if s == 3 else 1.0 / (s + 1)} for s in range(6)]
    records += [{"step": 2, "val/loss": 0.5}, {"step": 5, "val/loss": "nan"}]
    draw_loss_curve(records, tmp_path / "loss.png", "a run")
    for name in ("empty.png", "loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2


def progress_line(terminal: bool, clock: Callable[[], float], width: int = 120) -> tuple[ProgressLine, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width, highlight=False, _environ={})
    return ProgressLine(200, console=console, clock=clock), output


def test_a_log_gets_a_line_every_few_seconds_and_for_each_evaluation():
    now = 0.0
    line, output = progress_line(terminal=False, clock=lambda: now)
    for step in range(10, 201, 10):
        now += 1.0
        metrics = {"train/loss": 2.0, "train/tokens": 1000 * step, "throughput/tokens_per_s": 61_300}
        line.update(step, metrics | ({"val/loss": 2.25} if step == 50 else {}))
    line.close()
    shown = output.getvalue().splitlines()
    assert shown[0] == "step  10/200  loss 2.0000  10k tokens, 61.3k/s  0:19 left"
    assert shown[1] == "step  50/200  loss 2.0000  val 2.2500  50k tokens, 61.3k/s  0:15 left"
    assert shown[-1] == "step 200/200  loss 2.0000  val 2.2500 @50  200k tokens, 61.3k/s"
    assert [text.split()[1] for text in shown] == ["10/200", "50/200", "150/200", "200/200"]


def test_the_whole_line_fits_a_terminal_of_80_columns():
    line, output = progress_line(terminal=True, clock=iter([0.0, 3.0, 6.0]).__next__, width=80)
    line.steps = 2000
    line.update(1000, {"val/loss": 2.5})
    line.update(1200, {"train/loss": 2.6, "train/tokens": 1.2e6, "throughput/tokens_per_s": 61_300})
    line.print("a [warning]")
    line.close()
    told = "step 1200/2000  loss 2.6000  val 2.5000 @1000  1.2M tokens, 61.3k/s  0:04 left"
    assert told in output.getvalue()
    assert len(told) == 78
    assert "a [warning]" in output.getvalue()
    assert output.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_reader_that_leaves_does_not_stop_the_run():
    script = """
from recipe.run.progress import ProgressLine
line = ProgressLine(2)
line.update(1, {"train/loss": 2.0})
line.update(2, {"train/loss": 1.0})
line.close()
print("the end")
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
