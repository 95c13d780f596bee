"""compare.py as a user calls it."""

import errno
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import compare
from recipe.compare import page
from recipe.compare.runs import ReportError
from recipe.errors import UserError
from tests.programs import completed, started
from tests.recipe.compare.synthetic import write_run, write_runs
from tests.recipe.run.test_wandb_thread import StandIn


@pytest.fixture
def sweep(tmp_path):
    write_runs(tmp_path / "sweep", steps=60)
    return tmp_path / "sweep"


def test_one_command_writes_the_report_into_the_sweep(sweep, capsys):
    compare.main([str(sweep)])
    out = capsys.readouterr().out
    assert out.startswith("Parity is open for flash.\nreport: ")
    assert f"report: {sweep / 'report' / 'index.html'}" in out
    assert (sweep / "report" / "index.html").is_file()
    (sweep / "ladder.json").write_text('{"format": 1, "depths": [1, 2]}')  # of an earlier version
    compare.main([str(sweep)])  # a second time reads the runs, not the report
    assert capsys.readouterr().out == out


def test_the_report_on_several_folders_is_in_a_new_folder(sweep, here):
    compare.main(["sweep/naive-1", "sweep/flash-1"])
    assert (here / "report-out" / "index.html").is_file()
    compare.main(["sweep/naive-1", "sweep/flash-1", "out=elsewhere", "reference=flash"])
    assert "flash" in (here / "elsewhere" / "index.html").read_text()


def test_runs_that_cannot_be_compared_are_in_separate_sections(tmp_path):
    for lr in (0.001, 0.01):
        for seed, (seq_len, batch_size) in enumerate(((128, 8), (256, 4))):
            folder, changed = tmp_path / f"{lr}-{seq_len}", {"optimizer.lr": lr}
            write_run(folder, seed=seed, seq_len=seq_len, batch_size=batch_size, steps=60, overrides=changed)
    compare.main([str(tmp_path)])
    page = (tmp_path / "report" / "index.html").read_text()
    for lr in (0.001, 0.01):
        title = f"gpt2 on stdlib, optimizer.lr={lr}"
        assert f"<h2>{title}</h2>" in page


def test_torch_is_not_needed(sweep):
    """Importing torch, wandb or Hydra fails here, and the report is written all the same."""
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'model', 'wandb', 'hydra'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked)\n"
        f"import compare; compare.main([{str(sweep)!r}])"
    )
    completed("-c", code, PYTHONPATH="")  # not forked from a process that has torch
    assert (sweep / "report" / "index.html").is_file()


def test_failures_are_one_sentence_and_a_status(tmp_path, forked):
    done = started("compare.py", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: no runs found in ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing"], "missing is not a folder"),
        (["/dev/null"], "/dev/null is not a folder"),
        (["out=x"], "needs a folder of runs"),
        ([".", "wandb=maybe"], "wandb=maybe is not a mode; choose one of online, offline, disabled"),
    ],
)
def test_mistakes_are_named(arguments, sentence, here):
    with pytest.raises(UserError, match=sentence):
        compare.main(arguments)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/x"])
def test_a_place_that_cannot_be_written_to_is_named(out, sweep, here):
    (here / "file").write_text("")
    with pytest.raises(ReportError, match=rf"^the report cannot be written to {out} \(.+\), .* out=<folder>\.$"):
        compare.main([str(sweep), f"out={out}"])


def test_a_full_disk_leaves_the_page_of_before_and_names_the_way_on(sweep, monkeypatch):
    compare.main([str(sweep)])
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}

    def full(path, *_, **__):
        assert list(path.parent.glob("figures/*.png"))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # of the page, after its figures
    with pytest.raises(ReportError, match=r"No space left.*nothing of it was; free space there, or name another"):
        compare.main([str(sweep)])
    assert {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()} == before


def test_a_reference_that_did_not_run_is_named(sweep):
    with pytest.raises(ReportError, match="reference=navie is not among the runs; there are naive, flash"):
        compare.main([str(sweep), "reference=navie"])


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_report_joins_the_group_of_its_runs_in_wandb(mode, tmp_path, monkeypatch, capsys):
    tracked = {"tracking.mode": mode, "tracking.group": "sweep-1", "tracking.project": "mine"}
    write_runs(tmp_path / "sweep", steps=60, overrides=tracked)
    wandb = StandIn()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    compare.main([str(tmp_path / "sweep")])
    if mode == "disabled":
        assert wandb.calls == []
        return
    report = tmp_path / "sweep" / "report"
    where = "https://wandb.example/run" if mode == "online" else f"wandb sync {report / 'wandb' / 'offline-run-1'}"
    assert f"W&B: {where}\n" in capsys.readouterr().out
    (options,) = wandb.of("init")
    assert {"group": "sweep-1", "project": "mine", "mode": mode}.items() <= options.items()
    assert wandb.calls[1:] == [("file", str(report / "index.html")), ("artifact", "report"), ("finish", 0)]


def test_a_wandb_that_hangs_costs_a_limited_time(sweep, forked, monkeypatch):
    """The process, too, ends: W&B's own threads do not hold it."""
    monkeypatch.setattr(page, "LIMIT", 0.1)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=lambda **_: threading.Event().wait(100)))
    said = page.publish(compare.find_runs([sweep]).runs, sweep, "online")
    assert said == "W&B has stopped (it did not finish within 0.1 s); the report on disk is complete."
    (sweep.parent / "wandb.py").write_text(
        "import atexit, time\natexit.register(time.sleep, 100)\ndef Settings(**_): raise RuntimeError('no server')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(sweep.parent), prepend=os.pathsep)
    said = completed("compare.py", sweep, "wandb=online")
    assert "W&B has stopped (RuntimeError: no server); the report on disk is complete." in said
