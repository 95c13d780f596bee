"""A sweep through Hydra's submitit launcher, whose local executor stands for Slurm."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT
from recipe.run.compose import composed
from recipe.run.wording import explain
from tests.recipe.distributed.test_faults import wait_for
from tests.recipe.training.test_resume import steps_logged

OVERRIDES = [
    "data=text", "data.path=text.txt", "data.cache=cache", "device=cpu", "seq_len=32", "tracking=disabled",
    "model.n_layers=1", "model.n_embd=32", "training.steps=100000", "training.log_every=1",
    "training.eval_every=0", "training.checkpoint_every=100000",
]  # fmt: skip


# Python imports this as it starts: each task of the local executor gets the variables that Slurm would set.
AS_SLURM = """
import contextlib, os, sys
if "SUBMITIT_LOCAL_GLOBALID" in os.environ:
    names = {"PROCID": "GLOBALID", "STEP_NUM_TASKS": "NTASKS", "LOCALID": "LOCALID", "JOB_ID": "JOB_ID"}
    for name, local in names.items():
        os.environ[f"SLURM_{name}"] = os.environ[f"SUBMITIT_LOCAL_{local}"]
    os.environ |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
if "submitit.local._local" not in sys.orig_argv:  # which names the job by its own process id
    sys.path.remove(os.path.dirname(__file__))
    del sys.modules["sitecustomize"]
    with contextlib.suppress(ImportError):
        import sitecustomize  # the next one: that of the fixture `forked`
"""


def summary_of(run: Path) -> dict[str, Any]:
    path = run / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def tasks_of(sweep: Path) -> list[int]:
    """The processes of a sweep's only job, by rank. The local executor names a job after their parent."""
    (job,) = (path.name for path in (sweep / ".submitit").glob("*") if path.name.isdigit())
    return [int(task) for task in Path(f"/proc/{job}/task/{job}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_job_of_two_tasks_is_queued_again_and_resumes_and_is_named_in_a_sentence_if_it_fails(tmp_path):
    """From any folder: after the signal that Slurm sends shortly before the time limit, then with a task killed."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "text.txt").write_text(Path(os.__file__).read_text()[:20_000])
    (tmp_path / "sitecustomize.py").write_text(AS_SLURM)
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    command = [sys.executable, str(ROOT / "train.py"), "-m", *launcher, "hydra.sweep.dir=sweep", *OVERRIDES]
    sweep, run = tmp_path / "sweep", tmp_path / "sweep" / "0"
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as started:
        try:
            wait_for(lambda: steps_logged(run) >= 5, started)
            for task in tasks_of(sweep):
                os.kill(task, signal.SIGUSR2)
            wait_for(lambda: summary_of(run).get("status") == "interrupted", started)
            saved = steps_logged(run)
            wait_for(lambda: steps_logged(run) > saved, started)
            os.kill(tasks_of(sweep)[1], signal.SIGKILL)
            said = started.communicate(timeout=60)[1]
        finally:
            started.kill()
            with contextlib.suppress(FileNotFoundError):  # the job has ended, as it should
                for task in tasks_of(sweep):
                    os.kill(task, signal.SIGKILL)
    (output,) = sweep.glob(".submitit/*/*_0_log.out")
    assert f"resuming from {Path('sweep/0/checkpoints')}/step-{saved:08d}" in output.read_text()
    assert summary_of(run)["device"]["count"] == 2
    assert started.returncode == 1
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last.startswith("error: a job of the sweep failed: Rank 0 lost rank 1 in the middle of the run")
    assert "output is in .submitit/" in last


def test_slurm_jobs_have_a_gpu_each(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    slurm = composed(["hydra/launcher=slurm", "hydra.launcher.partition=gpu"]).hydra.launcher
    assert slurm._target_ == "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    assert (slurm.gpus_per_node, slurm.tasks_per_node, slurm.partition) == (1, 1, "gpu")


def test_without_submitit_the_package_to_install_is_named():
    with pytest.raises(Exception, match="submitit_of_another_name") as raised:
        composed(["hydra/launcher=submitit_of_another_name"])
    sentence = str(explain(raised.value))
    assert sentence.endswith("needs Hydra's submitit launcher; install it with: pip install -e '.[slurm]'")
