"""Several ranks lose nothing when one of them is killed or interrupted, and resume as one."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe.training.checkpoint_files import PARTIAL
from tests.forked.server import process_of
from tests.programs import ROOT, losses, summary
from tests.recipe.training.test_resume import final_state, newest_step, steps_logged, train

STEPS = 80
OVERRIDES = [
    "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=32", "device=cpu", "tracking=disabled",
    "model.n_layers=1", "model.n_embd=32", "model.dropout=0.1", "attention.dropout=0.1",
    "training.batch_size=2", "training.batch_tokens=128", f"training.steps={STEPS}",
    "training.log_every=1", f"training.eval_every={STEPS // 2}", "training.checkpoint_every=5",
    "training.sample_tokens=0",
]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]


def ranks_of(torchrun: subprocess.Popen[bytes]) -> dict[str, int]:
    """Rank -> process id, of the ranks that torchrun has started."""
    found = {}
    launcher = process_of(torchrun.pid)
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    found[variable.removeprefix(b"RANK=").decode()] = process_of(int(child))
    return found


def wait_for(condition: Callable[[], bool], started: subprocess.Popen[Any]) -> None:
    while not condition():
        assert started.poll() is None
        time.sleep(0.01)


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step-*")}


def kill_during_a_save(run: Path, torchrun: subprocess.Popen[bytes]) -> set[str]:
    """Stop the second rank while a checkpoint is half-written, so that the save never ends, and kill it.

    Returns the names of the complete checkpoints at that time.
    """

    def unfinished():
        return any((run / "checkpoints").glob(f"{PARTIAL}step-*"))

    while True:
        wait_for(unfinished, torchrun)
        second = ranks_of(torchrun)["1"]
        os.kill(second, signal.SIGSTOP)
        time.sleep(0.3)
        if unfinished():
            whole = checkpoints(run)
            os.kill(second, signal.SIGKILL)
            return whole
        os.kill(second, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_killed_rank_and_an_interrupted_one_lose_nothing(here):
    """torchrun starts the ranks again after a kill in a save; after the signal all stop, and one goes on alone."""
    shutil.copy(os.__file__, "text.txt")
    run, whole = Path("run"), Path("whole")
    train(*OVERRIDES, f"training.checkpoint_every={STEPS}", "hydra.run.dir=whole")

    command = [sys.executable, *TORCHRUN, str(ROOT / "train.py"), *OVERRIDES, "resume=auto", "hydra.run.dir=run"]
    with Path("said").open("wb") as said:
        torchrun = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        wait_for(lambda: steps_logged(run) > 10, torchrun)
        first = ranks_of(torchrun)
        left_whole = kill_during_a_save(run, torchrun)
        wait_for(lambda: ranks_of(torchrun).keys() == {"0", "1"} and ranks_of(torchrun) != first, torchrun)
        assert left_whole & checkpoints(run)
        before = steps_logged(run)
        wait_for(lambda: steps_logged(run) > before + 6, torchrun)
        os.kill(ranks_of(torchrun)["1"], signal.SIGTERM)
        assert torchrun.wait(60) != 0
    finally:
        torchrun.kill()
        torchrun.wait()
    text = Path("said").read_text()
    step = newest_step(run)
    assert (summary(run)["status"], summary(run)["step"], losses(run)[-1][0]) == ("interrupted", step, step), text
    assert "resuming from" in text
    assert f"stopped by SIGTERM after step {step} of {STEPS}; resume=run goes on\n" in text

    train("resume=auto", f"training.checkpoint_every={STEPS}", "hydra.run.dir=run")
    assert [step for step, _, _ in losses(run)] == list(range(STEPS + 1))
    assert sum(validation is not None for _, _, validation in losses(run)) == 3
    assert losses(run) == losses(whole)
    ours, theirs = final_state(run), final_state(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
