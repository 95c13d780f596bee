"""Sweeps whose jobs are processes: what runs, what is skipped, and how failures and signals end.

In train.py's place the jobs run a script of a few lines that ends as its overrides say.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.run.compose import jobs as jobs_of
from recipe.run.config import register
from recipe.run.jobs import Job, SweepError, names_of
from recipe.run.queue import Queue, chosen_devices
from tests.programs import summary

JOB = """
import json, os, signal, sys, time
from pathlib import Path

overrides = dict(argument.split("=", 1) for argument in sys.argv[1:])
folder = Path(overrides["hydra.run.dir"].strip("'"))
(folder / ".hydra").mkdir(parents=True, exist_ok=True)
recorded = [argument for argument in sys.argv[1:] if not argument.startswith("hydra.")]
(folder / ".hydra" / "overrides.yaml").write_text(json.dumps(recorded))
with (folder / "calls").open("a") as calls:
    seen = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS")}
    calls.write(json.dumps({"argv": sys.argv[1:], **seen}) + "\\n")

def end(status, message=None, code=0, **more):
    (folder / "summary.json").write_text(json.dumps({"status": status, "message": message, "val_loss": 2.5, **more}))
    if message:
        print("error:", message)
    sys.exit(code)

kind = overrides["kind"]
if kind == "completes":
    end("completed")
if kind == "fails":
    end("failed", "optimizer.lr=9 is too high.", 1)
if kind == "misconfigured":
    print("error: seq_len=abc is not a whole number.")
    sys.exit(1)
if kind == "breaks":
    end("failed", "Step 3 was not finite.", 1, non_finite_step=3)
if kind == "large" and int(overrides["seq_len"]) >= 512:
    end("out_of_memory", "It does not fit.", 1)
if kind == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "meets":  # both jobs at once, or none ends well
    (folder.parent / f"here{overrides['seed']}").touch()
    for _ in range(500):
        if len(list(folder.parent.glob("here*"))) == 2:
            end("completed")
        time.sleep(0.01)
    end("failed", "Nobody came.", 1)
if kind == "waits":
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\\n')
    signal.signal(signal.SIGINT, lambda number, frame: end("interrupted", code=130))
    (folder / "ready").touch()
    time.sleep(60)
end("completed")
"""


@pytest.fixture
def sweep(here, monkeypatch):
    """sweep(jobs, **options): launch the jobs of a sweep into `multirun/2026-11-20/<name>`."""
    script = here / "train.py"
    script.write_text(JOB)
    monkeypatch.setattr("recipe.run.queue.SECONDS_BETWEEN_POLLS", 0.01)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))

    def run(jobs, name="10-00-00", devices=None, command=("-m", "experiment=wall")):
        monkeypatch.setattr(sys, "argv", ["train.py", *command])
        folder = here / "multirun" / "2026-11-20" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = OmegaConf.create(
            {
                "hydra": {
                    "launcher": {"gpus": None, "jobs": 1},
                    "sweep": {"dir": f"multirun/2026-11-20/{name}"},
                    "overrides": {"hydra": ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={folder}", "hydra.verbose=true"]},
                    "runtime": {"choices": {"experiment": "wall"}},
                },
                "tracking": {"group": None},
            }
        )
        queue = Queue(config)
        queue.devices = devices or [None]
        where = Path(config.hydra.sweep.dir)
        queue.run([Job(n, tuple(job.split()), where / str(n), "ablate" in job) for n, job in enumerate(jobs)])

    return run


def calls(tmp_path: Path, job: int, name: str = "10-00-00") -> list[dict]:
    """One entry for each start of a job, with its arguments."""
    path = tmp_path / "multirun" / "2026-11-20" / name / str(job) / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_job_is_a_process_with_its_overrides_folder_and_the_sweeps_group(sweep, tmp_path):
    sweep(["kind=completes seed=1", "kind=completes seed=2"])
    for number, seed in ((0, 1), (1, 2)):
        (call,) = calls(tmp_path, number)
        assert call["argv"] == [
            "kind=completes",
            f"seed={seed}",
            "hydra.verbose=true",
            "hydra.mode=RUN",
            f"hydra.run.dir='multirun/2026-11-20/10-00-00/{number}'",
            "resume=auto",
            "tracking.group='wall-2026-11-20-10-00-00'",
        ]


def test_a_sweep_goes_on_after_a_failure_and_names_it_in_the_end(sweep, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep(["kind=fails", "kind=misconfigured", "kind=killed", "kind=completes"])
    assert ended.value.code == 1
    assert len(calls(tmp_path, 3)) == 1
    printed = capsys.readouterr().out
    assert "error: job 0 (kind=fails): optimizer.lr=9 is too high." in printed
    assert "error: job 1 (kind=misconfigured): seq_len=abc is not a whole number." in printed
    assert "error: job 2 (kind=killed): it was ended by SIGKILL" in printed
    assert "job 3" not in printed.split("error:", 1)[1]
    assert "python compare.py multirun/2026-11-20/10-00-00\n" in printed


def test_a_sweep_started_again_repeats_only_what_is_not_done(sweep, tmp_path, capsys):
    jobs = ["kind=completes", "kind=fails", "kind=large seq_len=512"]
    for _ in range(2):
        with pytest.raises(SystemExit):
            sweep(jobs)
    assert [len(calls(tmp_path, job)) for job in range(3)] == [1, 1, 1]  # the failed job started from the beginning
    assert "3 jobs, 2 of them done already" in capsys.readouterr().out


def test_a_loss_that_breaks_is_a_failure_unless_a_line_was_left_out(sweep):
    with pytest.raises(SystemExit):
        sweep(["kind=breaks"], name="10-00-00")
    sweep(["attention.ablate=no_rescaling kind=breaks"], name="11-00-00")
    with pytest.raises(SystemExit):
        sweep(["attention.ablate=no_rescaling kind=fails"], name="12-00-00")


def test_ctrl_c_ends_the_job_cleanly_and_the_sweep_with_it(sweep, tmp_path, capsys):
    folder = tmp_path / "multirun" / "2026-11-20" / "10-00-00"

    def interrupt():
        while not (folder / "0" / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        sweep(["kind=waits", "kind=completes"])
    thread.join()
    assert ended.value.code == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert summary(folder / "0")["status"] == "interrupted"
    assert calls(tmp_path, 1) == []
    printed = capsys.readouterr().out
    assert "Stopped with 2 of 2 jobs left" in printed
    assert "python train.py -m experiment=wall hydra.sweep.dir=multirun/2026-11-20/10-00-00" in printed


def test_several_gpus_take_a_job_each(sweep, tmp_path):
    sweep([f"kind=completes seed={seed}" for seed in range(4)], devices=["4", "6"])
    assert {calls(tmp_path, job)[0]["gpu"] for job in range(4)} == {"4", "6"}
    assert calls(tmp_path, 0)[0]["gpu"] != calls(tmp_path, 1)[0]["gpu"]


def test_jobs_on_a_cpu_run_at_once_and_share_the_cores_that_the_sweep_may_use(sweep, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sweep([f"kind=completes seed={seed}" for seed in range(2)], devices=chosen_devices(None, jobs=3))
    assert [calls(tmp_path, job)[0]["threads"] for job in range(2)] == ["3", "3"]
    sweep([f"kind=meets seed={seed}" for seed in range(2)], name="11-00-00", devices=chosen_devices(None, jobs=2))
    for gpus, jobs in ((None, 0), ("all", 2)):
        with pytest.raises(SweepError, match="must be at least 1, and 1 with hydra"):
            chosen_devices(gpus, jobs)


def test_gpus_are_those_of_cuda_visible_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert chosen_devices(None) == [None]
    assert chosen_devices("all") == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    assert chosen_devices("all") == ["5", "6", "7"]
    wrong: Any = [0, 1]
    with pytest.raises(SweepError, match=r"gpus=\[0, 1\] must be all.* CUDA_VISIBLE_DEVICES=0,1 to use some"):
        chosen_devices(wrong)


def test_jobs_are_named_by_what_distinguishes_them():
    def named(*jobs):
        return list(names_of([Job(n, tuple(x.split()), Path()) for n, x in enumerate(jobs)]).values())

    assert named("a=1 seed=1", "a=1 seed=2") == ["seed=1", "seed=2"]
    assert named("attention=tiled a=1", "attention=naive a=1") == ["tiled", "naive"]
    assert named("a=1 seed=1", "a=1 seed=1") == ["a=1 seed=1", "a=1 seed=1"]
    assert named("a=1") == ["a=1"]

    register()
    swept = enumerate(jobs_of(["attention=mine.py:rows,naive", "data.path=a\\ b"]))
    assert names_of([Job(n, tuple(x), Path()) for n, x in swept]) == {0: "mine.py:rows", 1: "naive"}
