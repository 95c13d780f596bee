"""Whatever W&B does, the run neither waits nor fails. A stand-in for the wandb package misbehaves on demand."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.run import process
from recipe.run import tracker as tracking
from recipe.run.jobs import Job, write_manifest
from recipe.run.tracker import Tracker, TrackingConfig, TrackingMode
from tests.programs import ROOT, summary


class StandIn:
    """The wandb package, and a run of it: it notes its calls, and fails or hangs in one of them.

    step  the steps that its server has
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.step, self.fault, self.released = 0, "", threading.Event()
        self.Settings, self.Image, self.Artifact = SimpleNamespace, str, self.artifact
        self.summary: dict[str, Any] = {}

    def note(self, name: str, content: Any) -> None:
        if self.fault == f"raise in {name}":
            raise RuntimeError("quota\nexceeded")
        if self.fault == f"hang in {name}":
            self.released.wait()
        self.calls.append((name, content))

    def of(self, name: str) -> list[Any]:
        return [content for call, content in self.calls if call == name]

    def init(self, settings: Any, **options: Any) -> Any:
        self.note("init", options)
        self.url = "https://wandb.example/run" if options["mode"] == "online" else None
        self.dir = f"{options['dir']}/wandb/offline-run-1/files"
        return self

    def log(self, data: dict[str, Any], step: int) -> None:
        self.note("log", (step, data))

    def artifact(self, name: str, type: str) -> Any:
        return SimpleNamespace(name=name, add_file=lambda path: self.note("file", path))

    def log_artifact(self, artifact: Any) -> None:
        self.note("artifact", artifact.name)

    def finish(self, exit_code: int) -> None:
        self.note("finish", exit_code)


@pytest.fixture
def wandb(monkeypatch):
    """The stand-in, from which every thread is released in the end."""
    stand_in, before = StandIn(), threading.enumerate()
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setattr(process, "leave_at_once", lambda: None)
    yield stand_in
    stand_in.released.set()
    for thread in threading.enumerate():
        if thread.name == "wandb" and thread not in before:  # before it imports the real package
            thread.join(2)


def track(folder: Path, resume_step: int | None = None, mode: TrackingMode = TrackingMode.offline) -> Tracker:
    config = TrackingConfig(mode=mode, project="p", group="g")
    return Tracker(folder, config, recorded={"seed": 1, "git": "c"}, steps=4, resume_step=resume_step)


def test_wandb_holds_what_the_run_folder_holds(tmp_path, wandb, capsys):
    run = tmp_path / "run"
    ended = {"status": "completed", "config": {"seed": 1}, "git": "c", "val_loss": 3.0}
    with track(run) as tracker:
        tracker.log(0, {"val/loss": 3.0})
        tracker.log(2, {"train/loss": float("nan"), "parity/worst_parameter": "w"})
        tracker.finish(ended)
    (options,) = wandb.of("init")
    assert (options["mode"], options["project"], options["group"]) == ("offline", "p", "g")
    assert (options["dir"], options["name"]) == (str(run), f"{tmp_path.name}/run")
    assert (options["config"], options["tags"]) == ({"seed": 1, "git": "c"}, [])
    assert repr(wandb.of("log")) == repr(
        [
            (0, {"val/loss": 3.0}),
            (2, {"train/loss": float("nan"), "parity/worst_parameter": "w"}),
            (2, {"figures/loss": str(run / "loss.png")}),
        ]
    )
    assert wandb.of("finish") == [0]
    assert wandb.summary == {"summary": {"status": "completed", "val_loss": 3.0}}, "the configuration is there once"
    assert capsys.readouterr().out.splitlines()[-1].split() == ["W&B", "wandb", "sync", str(Path(wandb.dir).parent)]

    (run / "summary.json").write_text(json.dumps(ended | {"eval": {"quiz": {"acc": 0.5}}}))
    assert not tracking.send_again(run, TrackingConfig(mode=TrackingMode.offline, project="p", group="g"))
    assert wandb.of("init")[1] == options, "the same run"
    assert [step for step, _ in wandb.of("log")] == [0, 2, 2] * 2, "an offline folder is complete by itself"
    assert wandb.summary["summary"]["eval"] == {"quiz": {"acc": 0.5}}


def test_the_names_and_tags_in_wandb_tell_the_runs_of_a_sweep_apart(tmp_path, wandb):
    swept = [["experiment=wall", f"attention={name}", f"seq_len={n}"] for name in ("naive", "tiled") for n in (64, 128)]
    write_manifest(tmp_path, [Job(n, tuple(lines), tmp_path / str(n)) for n, lines in enumerate(swept)])
    parts = {"attention": {"name": "tiled"}, "score": {"name": "causal"}, "model": {"name": "tiny"}}
    with Tracker(tmp_path / "3", TrackingConfig(), recorded=parts, steps=1) as tracker:
        tracker.finish({})
    (options,) = wandb.of("init")
    assert (options["name"], options["tags"]) == ("3 tiled seq_len=128", ["tiled", "causal", "tiny"])


@pytest.mark.parametrize("place", ["init", "log", "finish"])
@pytest.mark.parametrize(("kind", "reason"), [("raise", "RuntimeError: quota exceeded"), ("hang", "did not finish")])
def test_a_failing_or_hanging_wandb_costs_one_warning_and_no_time(
    tmp_path, wandb, capsys, monkeypatch, place, kind, reason
):
    wandb.fault = f"{kind} in {place}"
    monkeypatch.setattr(tracking, "SECONDS_TO_FINISH", {"offline": 0.3})
    start = time.monotonic()
    with track(tmp_path / "run") as tracker:
        for step in range(5):
            tracker.log(step, {"train/loss": 1.0})
        tracker.finish({"status": "completed"})
    assert time.monotonic() - start < 8
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert reason in warning
    assert "metrics.jsonl" in warning
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert (tmp_path / "run" / "summary.json").exists()


def test_lines_that_nobody_takes_are_dropped(tmp_path, wandb, capsys, monkeypatch):
    wandb.fault = "hang in init"
    monkeypatch.setattr("recipe.run.wandb_thread.MOST_WAITING", 3)
    with track(tmp_path / "run") as tracker:
        for step in range(9):
            tracker.log(step, {})
        tracker.finish({})
    assert capsys.readouterr().out.count("W&B has stopped (it does not answer)") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 9


def test_a_run_that_breaks_off_is_closed_as_failed(tmp_path, wandb):
    def run():
        with track(tmp_path / "run") as tracker:
            tracker.log(1, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    deadline = time.monotonic() + 10  # the thread may still be at it
    while not wandb.of("finish") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert wandb.of("finish") == [1]


def test_a_resumed_run_keeps_its_id_and_is_sent_what_it_lacks(tmp_path, wandb, capsys):
    with track(tmp_path / "run") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": 1.0})
    with track(tmp_path / "run", resume_step=2) as tracker:
        tracker.log(4, {"train/loss": 1.0})
    wandb.step = 2  # the steps below 2 are on the server
    with track(tmp_path / "run", resume_step=2, mode=TrackingMode.online) as tracker:
        tracker.finish({})
    assert len({options["id"] for options in wandb.of("init")}) == 1
    assert [options["resume"] for options in wandb.of("init")] == [None, None, "allow"]
    assert [step for step, _ in wandb.of("log")] == [1, 2, 3, 1, 2, 4, 2, 2]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["W&B", "https://wandb.example/run"]


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from recipe.run import process
process.begin()
from recipe.run import tracker as tracking
tracking.SECONDS_TO_FINISH = {"online": 20.0}

def program():
    config = tracking.TrackingConfig(mode=tracking.TrackingMode.online)
    with tracking.Tracker(Path(sys.argv[1]), config, recorded={"seed": 1}, steps=4) as tracker:
        for step in range(3):
            tracker.log(step, {"train/loss": 1.0, "parity/worst_parameter": "w"})
        if "stop" in sys.argv:
            while tracker.wandb.location is None:
                time.sleep(0.05)
            tracking.SECONDS_TO_FINISH = {"online": 1.0}
            for children in Path("/proc/self/task").glob("*/children"):
                for pid in children.read_text().split():
                    os.kill(int(pid), signal.SIGSTOP)
                    print("stopped", pid)
        tracker.finish({"status": "completed", "val_loss": 1.0})
    sys.exit(3)

process.run(program)
"""


def run_with_the_real_wandb(folder: Path, *arguments: str) -> str:
    """The output of PROGRAM, without a key for W&B's server."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"HOME": str(folder), "NETRC": str(folder / "netrc")}
    command = [sys.executable, "-c", PROGRAM, str(folder / "run"), *arguments]
    with (folder / "output").open("w") as output:  # a pipe would stay open as long as the service
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=60).returncode
    printed = (folder / "output").read_text()
    for line in printed.splitlines():
        if line.startswith("stopped"):
            os.kill(int(line.split()[1]), signal.SIGKILL)
    assert status == 3
    assert "wandb:" not in printed
    said = "warning: W&B records offline, because its server could not be used (UsageError: No API key"
    assert printed.count(said) == 1
    return printed


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_real_wandb_without_a_key_writes_an_offline_run(tmp_path):
    folder = Path(run_with_the_real_wandb(tmp_path).split()[-1])
    (recorded,) = folder.glob("run-*.wandb")
    assert b"parity/worst_parameter" in recorded.read_bytes()
    assert len(list(folder.glob("files/media/images/figures/loss*.png"))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_program_ends_although_the_service_of_the_real_wandb_has_stopped(tmp_path):
    assert "did not finish within 1 s" in run_with_the_real_wandb(tmp_path, "stop")
    assert summary(tmp_path / "run")["status"] == "completed"
