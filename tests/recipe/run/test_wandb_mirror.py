"""Whatever W&B does, the run neither waits nor fails. A stand-in for the wandb package misbehaves on demand."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe.run import tracker as tracking
from recipe.run.tracker import Tracker, TrackingConfig, TrackingMode
from recipe.run.wandb_mirror import complete_lines

STAND_IN = """
import json, os, sys, time

def note(event, **content):
    with open(os.environ["STAND_IN_NOTES"], "a") as file:
        file.write(json.dumps({"event": event, "pid": os.getpid(), **content}) + "\\n")

def behave(place):
    print("noise on stdout"); print("noise on stderr", file=sys.stderr); os.system("echo noise of a child")
    if os.environ.get("STAND_IN_FAULT") == f"raise in {place}":
        raise ModuleNotFoundError("No module named 'wandb'") if place == "import" else RuntimeError("quota\\nexceeded")
    if os.environ.get("STAND_IN_FAULT") == f"hang in {place}":
        time.sleep(60)
    if os.environ.get("STAND_IN_FAULT") == f"exit in {place}":
        os._exit(3)

class Settings:
    def __init__(self, **settings): self.settings = settings

class Image:
    def __init__(self, path): self.path = path

class Run:
    def __init__(self, options):
        self.dir = os.path.join(options["dir"], "wandb", "offline-run-" + options["id"], "files")
        self.url = "https://wandb.example/run" if options["mode"] == "online" else None
        self.step = int(os.environ.get("STAND_IN_STEP", 0))
        self.summary = {}
    def log(self, data, step):
        figures = {name: value.path for name, value in data.items() if isinstance(value, Image)}
        if figures:
            note("figures", step=step, **figures)
        else:
            behave("log"); note("log", step=step, data=repr(data))
    def save(self, path, base_path, policy):
        note("save", path=str(path.relative_to(base_path)), policy=policy)
    def finish(self, exit_code):
        behave("finish"); note("finish", exit_code=exit_code, summary=self.summary)

def init(settings, **options):
    behave("init"); note("init", options=options, settings=settings.settings)
    if os.environ.get("STAND_IN_FAULT") == "refuse online" and options["mode"] == "online":
        raise RuntimeError("No API key\\nconfigured.")
    return Run(options)

behave("import")
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which the stand-in records its calls."""
    package = tmp_path / "stand-in" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("STAND_IN_NOTES", str(tmp_path / "notes"))
    yield tmp_path / "notes"
    for entry in read(tmp_path / "notes"):
        assert not os.path.exists(f"/proc/{entry['pid']}"), "no process is left behind"


def read(notes: Path, event: str | None = None) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    return [entry for entry in entries if event in (None, entry["event"])]


def track(folder: Path, resume_step: int | None = None, mode: TrackingMode = TrackingMode.offline) -> Tracker:
    config = TrackingConfig(mode=mode, project="p", group="g")
    return Tracker(folder, config, run_config={"seed": 1}, steps=4, resume_step=resume_step, environment={"git": "c"})


def test_the_mirror_holds_what_the_run_folder_holds(tmp_path: Path, notes: Path) -> None:
    (tmp_path / "run" / "profile").mkdir(parents=True)
    (tmp_path / "run" / "profile" / "table.txt").write_text("matmul  61.0%")
    with track(tmp_path / "run") as tracker:
        tracker.log(0, {"val/loss": 3.0})
        tracker.log(2, {"train/loss": float("nan"), "parity/worst_parameter": "w"})
        tracker.finish({"status": "completed", "config": {"seed": 1}, "git": "c", "val_loss": 3.0})
    (init,) = read(notes, "init")
    options = init["options"]
    assert (options["mode"], options["project"], options["group"]) == ("offline", "p", "g")
    assert options["dir"] == str(tmp_path / "run")
    assert options["config"] == {"seed": 1, "git": "c"}
    assert init["settings"]["x_stats_pid"] == os.getpid()
    assert [(entry["step"], entry["data"]) for entry in read(notes, "log")] == [
        (0, repr({"val/loss": 3.0})),
        (2, repr({"train/loss": float("nan"), "parity/worst_parameter": "w"})),
    ]
    (figures,) = read(notes, "figures")
    assert (figures["step"], figures["figures/loss"]) == (2, str(tmp_path / "run" / "loss.png"))
    assert [(entry["path"], entry["policy"]) for entry in read(notes, "save")] == [("profile/table.txt", "now")]
    (finish,) = read(notes, "finish")
    assert finish["exit_code"] == 0
    assert finish["summary"] == {"summary": {"status": "completed", "val_loss": 3.0}}, "the configuration is there once"


def test_later_entries_of_the_summary_are_sent_to_the_same_run(tmp_path: Path, notes: Path) -> None:
    summary: dict[str, Any] = {"status": "completed", "config": {"seed": 1}, "git": "c"}
    with track(tmp_path / "run") as tracker:
        tracker.log(0, {"val/loss": 3.0})
        tracker.finish(summary)
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"eval": {"quiz": {"acc": 0.5}}}))
    assert not tracking.mirror_again(
        tmp_path / "run", TrackingConfig(mode=TrackingMode.offline, project="p", group="g")
    )
    first, second = read(notes, "init")
    assert first["options"] == second["options"]
    assert [entry["step"] for entry in read(notes, "log")] == [0, 0]  # an offline folder is self-contained
    assert read(notes, "finish")[1]["summary"] == {"summary": {"status": "completed", "eval": {"quiz": {"acc": 0.5}}}}


def test_without_its_server_wandb_records_offline_and_says_so(
    tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", "refuse online")
    with track(tmp_path / "run", mode=TrackingMode.online) as tracker:
        tracker.log(1, {"train/loss": 1.0})
        tracker.finish({})
    assert [entry["options"]["mode"] for entry in read(notes, "init")] == ["online", "offline"]
    assert [entry["step"] for entry in read(notes, "log")] == [1]
    output = capfd.readouterr().out
    reason = "(RuntimeError: No API key configured.)"
    assert output.count(f"warning: W&B records offline, because its server could not be used {reason}.") == 1
    assert output.splitlines()[-1].split()[:3] == ["W&B", "wandb", "sync"]


def test_the_mirror_makes_no_noise_and_the_last_line_says_how_to_upload(
    tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with track(tmp_path / "run") as tracker:
        tracker.finish({})
    output = capfd.readouterr()
    assert "noise " not in output.out + output.err
    name, command, verb, path = output.out.splitlines()[-1].split()
    assert (name, command, verb) == ("W&B", "wandb", "sync")
    assert Path(path).parent == tmp_path / "run" / "wandb"


FAULTS = [f"{fault} in {place}" for fault in ("raise", "exit") for place in ("import", "init", "log", "finish")]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_wandb_costs_one_warning(
    tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", fault)
    with track(tmp_path / "run") as tracker:
        for step in range(5):
            tracker.log(step, {"train/loss": 1.0})
        tracker.finish({"status": "completed"})
    output = capfd.readouterr()
    (warning,) = [line for line in output.out.splitlines() if line.startswith("warning:")]
    assert "metrics.jsonl" in warning
    reason = "No module named 'wandb'" if "import" in fault else "RuntimeError: quota exceeded"
    assert ("ended unexpectedly" if "exit" in fault else reason) in warning
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("place", ["import", "init", "log", "finish"])
def test_a_hanging_wandb_does_not_hold_the_run_up(
    tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("STAND_IN_FAULT", f"hang in {place}")
    monkeypatch.setattr(tracking, "SECONDS_TO_FINISH", {"offline": 0.5})
    start = time.monotonic()
    with track(tmp_path / "run") as tracker:
        for step in range(500):
            tracker.log(step, {"train/loss": 1.0})
        tracker.finish({})
    assert time.monotonic() - start < 20, "the stand-in hangs for a minute"
    assert capfd.readouterr().out.count("it did not finish within") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 500


def wait_for(notes: Path, event: str) -> None:
    deadline = time.monotonic() + 20
    while not read(notes, event):
        assert time.monotonic() < deadline, f"no {event}"
        time.sleep(0.02)


def test_a_wandb_that_is_killed_is_noticed_while_the_run_goes_on(
    tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with track(tmp_path / "run") as tracker:
        tracker.log(1, {})
        wait_for(notes, "log")
        assert tracker.mirror is not None
        tracker.mirror.process.send_signal(signal.SIGKILL)
        tracker.mirror.process.wait()
        tracker.log(2, {})
        assert capfd.readouterr().out.count("warning: W&B has stopped (its process ended unexpectedly;") == 1
        tracker.log(3, {})
        tracker.finish({})
    assert "warning" not in capfd.readouterr().out, "said once"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_run_is_closed_as_failed(tmp_path: Path, notes: Path) -> None:
    pid = os.fork()
    if pid == 0:
        tracker = track(tmp_path / "run")
        tracker.log(1, {"train/loss": 1.0})
        wait_for(notes, "init")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(notes, "finish")
    assert read(notes, "finish")[0]["exit_code"] == 1
    assert [entry["step"] for entry in read(notes, "log")] == [1]
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{read(notes)[0]['pid']}") and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_run_that_breaks_off_is_closed_as_failed(tmp_path: Path, notes: Path) -> None:
    def run() -> None:
        with track(tmp_path / "run") as tracker:
            tracker.log(1, {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert [entry["exit_code"] for entry in read(notes, "finish")] == [1]


def test_a_resumed_run_keeps_its_id_and_its_new_offline_folder_is_complete(tmp_path: Path, notes: Path) -> None:
    with track(tmp_path / "run") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": 1.0})
        tracker.finish({})
    with track(tmp_path / "run", resume_step=2) as tracker:
        tracker.log(4, {"train/loss": 1.0})
        tracker.finish({})
    first, second = read(notes, "init")
    assert first["options"]["id"] == second["options"]["id"]
    assert [e["step"] for e in read(notes, "log") if e["pid"] == second["pid"]] == [1, 2, 4]


def test_a_resumed_online_run_is_sent_what_it_lacks(
    tmp_path: Path, notes: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with track(tmp_path / "run", mode=TrackingMode.disabled) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {})
        tracker.finish({})
    monkeypatch.setenv("STAND_IN_STEP", "3")  # W&B has the steps below 3
    with track(tmp_path / "run", resume_step=3, mode=TrackingMode.online) as tracker:
        tracker.log(4, {})
        tracker.finish({})
    assert read(notes, "init")[0]["options"]["resume"] == "allow"
    assert [entry["step"] for entry in read(notes, "log")] == [3, 4]
    assert capfd.readouterr().out.splitlines()[-1].split() == ["W&B", "https://wandb.example/run"]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb", buffering=0) as writer, path.open("rb") as reader:
        writer.write(b'{"step": 1}\n{"step": 2, "a"')
        assert list(complete_lines(reader)) == [{"step": 1}]
        assert list(complete_lines(reader)) == []
        writer.write(b": 3}\n")
        assert list(complete_lines(reader)) == [{"step": 2, "a": 3}]


def test_runs_of_one_process_share_nothing(tmp_path: Path, notes: Path) -> None:
    for name in ("0", "1"):
        with track(tmp_path / "sweep" / name) as tracker:
            tracker.log(1, {})
            tracker.finish({})
    first, second = read(notes, "init")
    assert first["pid"] != second["pid"]
    assert first["options"]["id"] != second["options"]["id"]
    assert (first["options"]["name"], second["options"]["name"]) == ("sweep/0", "sweep/1")
    assert first["options"]["dir"] != second["options"]["dir"]


def test_disabled_means_no_process_and_no_folder(tmp_path: Path, notes: Path) -> None:
    with track(tmp_path / "run", mode=TrackingMode.disabled) as tracker:
        tracker.log(1, {})
        tracker.finish({})
    assert not read(notes)
    assert not (tmp_path / "run" / "wandb").exists()


def test_the_real_wandb_without_a_key_writes_an_offline_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "run" / "profile").mkdir(parents=True)
    (tmp_path / "run" / "profile" / "table.txt").write_text("matmul  61.0%")
    with track(tmp_path / "run", mode=TrackingMode.online) as tracker:
        for step in range(3):
            tracker.log(step, {"train/loss": 1.0, "parity/worst_parameter": "w"})
        tracker.finish({"status": "completed", "val_loss": 1.0})
    output = capfd.readouterr()
    warnings = [line for line in output.out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "W&B records offline, because its server could not be used (UsageError: No API key" in warnings[0]
    assert output.err == ""
    folder = Path(output.out.split()[-1])
    (recorded,) = folder.glob("run-*.wandb")
    assert b"parity/worst_parameter" in recorded.read_bytes()
    assert len(list(folder.glob("files/media/images/figures/loss*.png"))) == 1
    assert (folder / "files" / "profile" / "table.txt").read_text() == "matmul  61.0%"
