"""A sweep through Hydra's submitit launcher, whose local executor stands for Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.compose import composed
from cli.wording import explain
from config import register
from training.sweeps import launcher

ROOT = Path(__file__).parents[3]
OVERRIDES = [
    "data=text", "data.path=text.txt", "data.cache=cache", "device=cpu", "seq_len=32", "tracking=disabled",
    "model.n_layers=1", "model.n_embd=32", "training.steps=3", "training.sample_tokens=0",
    "training.eval_every=0", "training.checkpoint_every=0",
]  # fmt: skip


# Python imports this as it starts: each task of the local executor gets the variables that Slurm would set.
AS_SLURM = """
import os
if "SUBMITIT_LOCAL_GLOBALID" in os.environ:
    names = {"PROCID": "GLOBALID", "STEP_NUM_TASKS": "NTASKS", "LOCALID": "LOCALID", "JOB_ID": "JOB_ID"}
    for name, local in names.items():
        os.environ[f"SLURM_{name}"] = os.environ[f"SUBMITIT_LOCAL_{local}"]
    os.environ |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
"""


@pytest.mark.slow
def test_a_job_of_two_tasks_runs_from_any_folder_and_is_named_in_a_sentence_if_it_fails(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "text.txt").write_text(Path(os.__file__).read_text()[:20_000])
    (tmp_path / "sitecustomize.py").write_text(AS_SLURM)
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"]
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "train.py"),
            "-m",
            *launcher,
            "hydra.sweep.dir=sweep",
            "optimizer.lr=1e30",
            *OVERRIDES,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    summary = json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())
    assert (summary["status"], summary["non_finite_step"]) == ("failed", 2)
    assert summary["device"]["count"] == 2
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: a job of the sweep failed: Step 2 was not finite")
    assert "output is in .submitit/" in last
    assert list((tmp_path / "sweep" / ".submitit").glob("*/*_log.out"))


def test_slurm_jobs_have_a_gpu_each(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    register()
    launcher.register()
    slurm = composed(["hydra/launcher=slurm", "hydra.launcher.partition=gpu"]).hydra.launcher
    assert slurm._target_ == "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    assert (slurm.gpus_per_node, slurm.tasks_per_node, slurm.partition) == (1, 1, "gpu")


def test_without_submitit_the_package_to_install_is_named() -> None:
    register()
    launcher.register()
    with pytest.raises(Exception, match="submitit_of_another_name") as raised:
        composed(["hydra/launcher=submitit_of_another_name"])
    sentence = str(explain(raised.value))
    assert sentence.endswith("needs Hydra's submitit launcher; install it with: pip install -e '.[slurm]'")
