"""A resumed run is bitwise the run that was never interrupted, however it was interrupted."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from attention.check.judge import computing_with
from recipe.run.config import ConfigError
from recipe.run.launch import prepare
from recipe.run.recorded import read_config
from recipe.run.resume import check_resumable
from recipe.training.checkpoint import CheckpointError, load_checkpoint, newest_valid, read_manifest
from tests import programs
from tests.equal import assert_equal
from tests.programs import ROOT, contents, losses, rewrite, summary

STEPS = 60
# Dropout of both kinds, three micro-batches a step, and 61 steps to four epochs: every interruption is in mid-epoch.
OVERRIDES = [
    "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=32", "device=cpu", "tracking=disabled",
    "model=tiny-gpt2", "model.n_layers=2", "model.n_embd=32", "model.dropout=0.1", "attention.dropout=0.1",
    "training.batch_size=4", "training.batch_tokens=384", f"training.steps={STEPS}", "schedule.warmup_steps=5",
    "training.log_every=1", "training.eval_every=7", "training.eval_batches=2", "training.checkpoint_every=9",
    "training.sample_tokens=0",
]  # fmt: skip


def train(*overrides: str) -> None:
    assert programs.train(*overrides) == 0


def final_state(run: Path) -> dict[str, Tensor]:
    path, _ = newest_valid(run / "checkpoints")
    state = load_checkpoint(path)
    return {**state["model"], **state["training"]}


def steps_logged(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def newest_step(run: Path) -> int:
    path, _ = newest_valid(run / "checkpoints")
    return int(path.name.removeprefix("step-"))


def assert_same_run(run: Path, reference: Path) -> None:
    assert losses(run) == losses(reference)
    assert len(losses(run)) == STEPS + 1
    assert_equal(final_state(run), final_state(reference))
    assert summary(run)["status"] == "completed"
    assert summary(run)["best_val_loss"] == summary(reference)["best_val_loss"]


@pytest.fixture(scope="module")
def where(tmp_path_factory, forked):
    """A folder with a text, and in `whole` a run that was never interrupted."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text(Path(os.__file__).read_text()[:27_000])
    programs.completed(ROOT / "train.py", *OVERRIDES, "hydra.run.dir=whole", folder=folder)
    return folder


@pytest.mark.slow
def test_on_a_cpu_the_bits_are_those_of_the_number_of_threads_that_the_run_began_with(where, monkeypatch):
    """Of one thread and of two they differ, which torchrun and a process alone have by default."""
    monkeypatch.chdir(where)
    given = [*OVERRIDES, "seq_len=128", "training.batch_size=12", "training.batch_tokens=1536", "model.n_embd=128"]
    given += ["schedule=constant", "schedule.warmup_steps=0", "training.eval_every=0", "model.n_layers=2"]

    def run(name, threads, *overrides):
        """A run where torch has so many threads by default."""
        with computing_with(threads):
            train(*overrides, f"hydra.run.dir={name}")
        return Path(name)

    def different(run, other):
        theirs = final_state(other)
        return [name for name, tensor in final_state(run).items() if not torch.equal(tensor, theirs[name])]

    of_one, of_two = (run(f"of-{threads}", threads, *given, "training.steps=2") for threads in (1, 2))
    assert len(different(of_one, of_two)) > 10
    run("resumed", 2, *given, "training.steps=1", "training.cpu.threads=1")
    Path("resumed/.hydra/overrides.yaml").write_text(OmegaConf.to_yaml(given))
    resumed = run("resumed", 2, "resume=auto", "training.steps=2")
    assert losses(resumed) == losses(of_one)
    assert not different(resumed, of_one)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(where, capsys):
    """Stopped by a signal, resumed, killed, resumed."""
    run, overrides, stopped = where / "interrupted", OVERRIDES, 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        again = [sys.executable, str(ROOT / "train.py"), *overrides, "resume=auto", f"hydra.run.dir={run.name}"]
        process = subprocess.Popen(again, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        while steps_logged(run) < stopped + 14:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
        assert ("resuming from" in printed) == bool(stopped)
        before, stopped = stopped, newest_step(run)
        assert before < stopped < STEPS
        if number is signal.SIGKILL:
            assert process.returncode == -number
            assert stopped % 9 == 0
        else:
            assert process.returncode == 128 + number
            assert (summary(run)["status"], summary(run)["step"]) == ("interrupted", stopped)
            assert losses(run)[-1][0] == stopped
        overrides = []

    with contextlib.chdir(where):
        train("resume=auto", f"hydra.run.dir={run.name}")
    assert f"resuming from {run.name}/checkpoints/step-{stopped:08d}" in capsys.readouterr().out
    assert_same_run(run, where / "whole")


@pytest.fixture
def runs(where, here):
    """outputs/older and outputs/newer, copies of the complete run, below the working directory."""
    shutil.copy(where / "text.txt", here)
    for age, name in ((100, "older"), (50, "newer")):
        shutil.copytree(where / "whole", here / "outputs" / name, symlinks=True)
        os.utime(here / "outputs" / name / "checkpoints", (time.time() - age,) * 2)
    return here / "outputs"


def resumed(*arguments: str) -> str:
    """The run folder that these arguments resume in."""
    prepared = prepare(list(arguments))
    assert isinstance(prepared, list)
    folder = next(a for a in prepared if a.startswith("hydra.run.dir="))
    return folder.removeprefix("hydra.run.dir=").strip("'")


def damage(checkpoint: Path) -> None:
    (weights,) = (checkpoint / "model").iterdir()
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)


def test_auto_takes_the_newest_run_with_a_valid_checkpoint(runs):
    assert resumed("resume=auto") == "outputs/newer"
    (runs / "newest" / "checkpoints").mkdir(parents=True)
    assert resumed("resume=auto") == "outputs/newer"
    for checkpoint in (runs / "newer" / "checkpoints").glob("step-*"):
        damage(checkpoint)
    assert resumed("resume=auto") == "outputs/older"


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(runs, capsys):
    newest = Path("outputs/newer/checkpoints") / f"step-{STEPS:08d}"
    damage(newest)
    train("resume=auto")
    assert f"{newest} is damaged" in capsys.readouterr().out
    assert_same_run(runs / "newer", runs / "older")


def test_resuming_takes_the_recorded_overrides_and_the_new_ones(runs):
    changed = ["attention=tiled", "model.dropout=0", "optimizer.lr=1e-4", "training.batch_tokens=128"]
    train("resume=auto", "training.steps=63", *changed)
    recorded = summary(runs / "newer")
    assert (recorded["config"]["model"]["dropout"], recorded["config"]["optimizer"]["lr"]) == (0, 1e-4)
    assert (recorded["step"], recorded["attention"], recorded["config"]["seq_len"]) == (63, "tiled", 32)
    assert recorded["tokens"] == STEPS * 384 + 3 * 128
    assert [step for step, *_ in losses(runs / "newer")] == list(range(64))
    assert losses(runs / "newer")[: STEPS + 1] == losses(runs / "older")


def test_a_complete_run_is_left_as_it_is(runs, capsys):
    before = contents(runs)
    train("resume=outputs/older")
    assert "outputs/older is complete with 60 steps" in capsys.readouterr().out
    train("resume=outputs/older", "training.steps=30")
    assert "outputs/older has 60 steps already, more than 30;" in capsys.readouterr().out
    assert contents(runs) == before


def test_where_every_checkpoint_is_damaged_nothing_starts_again(runs):
    for checkpoint in (runs / "newer" / "checkpoints").glob("step-*"):
        damage(checkpoint)
    for arguments in (["resume=outputs/newer"], ["resume=auto", "hydra.run.dir=outputs/newer"]):
        with pytest.raises(CheckpointError, match=r"No checkpoint in .* is intact.*60 is damaged.*Start a new run"):
            prepare(arguments)
    shutil.rmtree(runs / "older")
    with pytest.raises(ConfigError, match="resume=auto finds no run with a valid checkpoint under outputs"):
        prepare(["resume=auto"])


def test_auto_starts_a_run_in_a_folder_without_a_checkpoint(runs):
    run = Path("outputs/killed-early")
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "val/loss": 9.0}\n')
    train(*OVERRIDES, "training.steps=8", "schedule=constant", "resume=auto", f"hydra.run.dir={run}")
    assert len(losses(run)) == 9
    assert losses(run)[0] == losses(runs / "newer")[0]


def test_another_model_or_other_data_are_refused_and_leave_the_run_alone(runs):
    before = contents(runs)
    refused = "step-00000060 was trained with .* instead of {}; leave that out"
    with pytest.raises(ConfigError, match=refused.format("model.n_layers=3")):
        prepare(["resume=auto", "model.n_layers=3"])
    assert contents(runs) == before
    checkpoint, _ = newest_valid(runs / "newer" / "checkpoints")
    config, now = read_manifest(checkpoint).metadata["config"], read_config(runs / "newer")
    del config["model"]["qk_norm"]  # as if the run were older than the option: it did what is the default
    for override, other in {
        "seq_len=16": replace(now, seq_len=16),
        "model.qk_norm=true": replace(now, model=replace(now.model, qk_norm=True)),
        "data.tokenizer=bpe": replace(now, data=replace(now.data, tokenizer="bpe")),
        "score.window=5": replace(now, score=replace(now.score, window=5)),
        "optimizer.name=muon": replace(now, optimizer=replace(now.optimizer, name="muon")),
    }.items():
        with pytest.raises(ConfigError, match=refused.format(override)):
            check_resumable(config, other, checkpoint)


def test_with_rotary_positions_a_resumed_run_may_have_longer_sequences(runs):
    run = runs / "rotary"
    train(*OVERRIDES, "model.positions=rotary", "training.steps=6", f"hydra.run.dir={run}")
    train(f"resume={run}", "seq_len=64", "training.batch_size=6", "training.steps=7")
    assert summary(run)["tokens"] == 7 * 384
    assert losses(run)[-1][1] < losses(run)[0][2]


def test_a_checkpoint_of_another_run_is_refused(runs):
    rewrite(runs / "newer" / ".hydra" / "config.yaml", "n_layers: 2", "n_layers: 3")
    rewrite(runs / "newer" / ".hydra" / "overrides.yaml", "model.n_layers=2", "model.n_layers=3")
    with pytest.raises(ConfigError, match=r"n_layers=2 instead of .*n_layers=3; .* put the run's own checkpoints"):
        prepare(["resume=auto"])
