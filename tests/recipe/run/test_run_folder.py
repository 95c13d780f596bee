"""A refused command changes nothing: neither the run to resume, nor a running one, nor the disk."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from recipe.run.recorded import read_config
from recipe.run.run_folder import locked, read_overrides
from tests.programs import contents, train

SMALL = [
    "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=32", "device=cpu", "tracking=disabled",
    "model.n_layers=1", "model.n_embd=16", "model.n_heads=2", "model.positions=rotary", "training.batch_size=4",
    "training.eval_batches=1", "training.sample_tokens=0", "schedule=constant",
]  # fmt: skip


@pytest.fixture
def folder(here):
    """The working directory: a text, and a run of three steps in `run`."""
    shutil.copy(os.__file__, "text.txt")
    assert train(*SMALL, "training.steps=3", "seed=1", "hydra.run.dir=run") == 0
    return here


def test_a_refused_resume_leaves_the_run_as_it_was(folder, refused):
    before, run = contents(folder), contents(folder / "run")
    # Twice the tokens of a step.
    assert "set training.batch_tokens=" in refused("resume=run", "training.steps=6", "seq_len=64")
    assert contents(folder) == before
    Path("text.txt").write_text("Another text. " * 2000)
    assert "The text of data=text has changed" in refused("resume=run", "training.steps=6")
    assert contents(folder / "run") == run
    shutil.copy(os.__file__, "text.txt")
    assert train("resume=run", "training.steps=5") == 0
    assert train("resume=run") == 0
    assert (read_config(Path("run")).seq_len, read_config(Path("run")).training.steps) == (32, 5)
    assert "seq_len=64" not in read_overrides(Path("run"))


def test_a_second_run_in_the_folder_of_one_that_runs_is_refused_and_changes_nothing(folder, refused, monkeypatch):
    again = [*SMALL, "seed=9", "hydra.run.dir=run"]
    with locked(Path("run")):
        before = contents(folder)
        for arguments in (["resume=run", "seed=9"], [*again, "resume=auto"]):
            assert "run belongs to a run that is still running" in refused(*arguments)
        # Another run begins after the command line was checked.
        monkeypatch.setattr("recipe.run.resume.check_not_running", lambda folder: None)
        monkeypatch.setattr("recipe.run.resume.check_unused", lambda folder, config: None)
        assert "still running" in refused(*again)
        assert contents(folder) == before
    assert "run already holds a run" in refused(*again)
    assert contents(folder) == before


@pytest.mark.parametrize("name", [["hydra.run.dir=new"], []], ids=["named", "dated"])
def test_a_run_that_is_refused_once_its_text_is_read_leaves_no_folder(folder, name, refused):
    before = contents(folder)
    assert "lower seq_len" in refused(*SMALL, "seq_len=100000", *name)
    assert contents(folder) == before


@pytest.mark.slow
def test_a_full_disk_ends_in_a_sentence_with_the_way_on_and_leaves_no_half_of_a_file(folder, refused, monkeypatch):
    one = [*SMALL, "training.steps=1"]
    for command, again, files in (
        (one, "hydra.run.dir=new resume=auto", ["tokenizer.json", "config.yaml", "summary.json"]),
        (["-m", *SMALL, "seed=1,2"], "hydra.sweep.dir=new", ["multirun.yaml", "sweep.json"]),
        (["experiment=arena", *SMALL], "hydra.sweep.dir=new", ["arena.json"]),
    ):
        for name in files:

            def to_disk(file, name=name):
                if name in file.name:
                    raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr("data.atomic.to_disk", to_disk)
            said = "error: new could not be written (No space left on device); free some space there, and repeat the "
            assert refused(*command, again.split()[0]) == f"{said}command with {again}.\n"
            assert [path for path in Path("new").rglob("*") if name in path.name] == []
        monkeypatch.setattr("data.atomic.to_disk", lambda file: file.flush())
        if command is one:
            assert train(*one, *again.split()) == 0
        shutil.rmtree("new")


def test_a_sweep_in_the_folder_of_another_is_refused_and_changes_nothing(folder, refused):
    """A sweep over two seeds, whose first job is complete."""
    shutil.move("run", "sweep/0")
    Path("sweep/sweep.json").write_text('{"group": "g", "jobs": []}')
    Path("sweep/multirun.yaml").write_text("seed: 1\n")
    before = contents(folder)
    again = ["-m", *SMALL, "training.steps=3", "hydra.sweep.dir=sweep"]
    assert "sweep/0 holds the run of" in refused(*again, "seed=3,4")
    assert contents(folder) == before
    for running in ("sweep", "sweep/0"):
        with locked(Path(running)):
            before = contents(folder)
            assert f"{running} belongs to a run that is still running" in refused(*again, "seed=1,2")
            assert contents(folder) == before
