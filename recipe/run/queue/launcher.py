"""A sweep in which every job is a separate process, so that no job inherits anything from the one before.

Peak memory, compiled graphs, the allocator's cache and the W&B run belong to a process. So the launcher starts
`python train.py <overrides>` for each job, one after the other, one on each GPU or several on the cores, follows
metrics.jsonl, and reports the outcome of each. It is a Hydra launcher, the default of conf/config.yaml.

submitit's local executor starts all jobs at once, and joblib's workers run several in one process; neither gives each
job a GPU, forwards signals, goes on after a failure or resumes a sweep.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig

from recipe.run.arms import LR
from recipe.run.queue.jobs import (
    CONSOLE,
    Job,
    SweepError,
    distinct_overrides,
    newest_sweep_of,
    read_manifest,
    recorded_group,
    shorter_out_of_memory,
    without,
    write_manifest,
)
from recipe.run.queue.sweep_progress import SweepProgress
from recipe.run.run_folder import locked

PLUGIN = str(Path(__file__).with_name("plugin"))
SECONDS_BETWEEN_POLLS = 0.2
# Hydra's overrides that describe the sweep; its jobs get the others.
SWEEP_OVERRIDES = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")
# The first asks a job to finish its step, the second to stop at once; the third is a SIGKILL.
SIGNALS_BEFORE_KILL = 2


@dataclass
class ProcessLauncherConfig:
    """The options under `hydra.launcher.*`.

    gpus  null: jobs have every GPU in sight; all, or a list such as [0,1]: one job at a time on each of them
    jobs  without gpus, the number of jobs that run at once, each on its share of the cores: small models use few
    """

    _target_: str = "hydra_plugins.sweeps.ProcessLauncher"
    gpus: Any = None
    jobs: int = 1


def register() -> None:
    """Make `hydra/launcher=process` known to Hydra in this process, with nothing to install."""
    if PLUGIN not in sys.path:
        sys.path.append(PLUGIN)  # Hydra imports launchers from a package of the name hydra_plugins only
    Plugins.instance().register(ProcessLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConfig)


@dataclass
class RunningJobs:
    """The running processes, each with its device, and the last signal received."""

    processes: dict[Job, tuple[subprocess.Popen[bytes], str | None]] = field(default_factory=dict)
    signal: int = 0
    signals: int = 0

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Send a signal on to every job, which finishes its step, writes a checkpoint and ends."""
        self.signal, self.signals = number, self.signals + 1
        for process, _ in self.processes.values():
            process.send_signal(number if self.signals <= SIGNALS_BEFORE_KILL else signal.SIGKILL)


@contextmanager
def forward_signals(running: RunningJobs) -> Iterator[None]:
    """Within the block, signals that would end this process go to its jobs instead."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, running.forward) for number in numbers}
    try:
        yield
    finally:
        for process, _ in running.processes.values():  # none, unless something went wrong here
            process.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep. See ProcessLauncherConfig for its options."""

    __module__ = "hydra_plugins.sweeps"  # Hydra takes launchers from this package only

    def __init__(self, gpus: Any = None, jobs: int = 1) -> None:
        """Raises SweepError for GPUs that are not there, and for both options at once."""
        self.devices = chosen_devices(gpus, jobs)
        self.ahead = 0  # jobs that a sweeper will launch after these
        self.cores = cores()  # for all jobs together
        self.threads = 1  # of each job, where several run at once
        self.seconds_between_polls = SECONDS_BETWEEN_POLLS

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not done yet, also after one of them fails.

        Exits with status 1 if one failed, with 128 + n after signal n. Raises SweepError where a job's folder holds
        something else, StillRunning where the sweep or one of its jobs runs already.
        """
        resume = any(override == "resume=auto" for job in job_overrides for override in job)
        wanted = [without(job, ["resume"]) for job in job_overrides] if resume else [list(job) for job in job_overrides]
        folder = self.folder(wanted, resume)
        jobs = [self.job(initial_job_idx + i, overrides, folder) for i, overrides in enumerate(wanted)]
        for job in jobs:
            job.check_folder()
        group = self.config.tracking.group or recorded_group(folder) or self.group(folder)
        running = RunningJobs()
        self.threads = max(1, self.cores // min(len(self.devices), len(jobs)))
        with locked(folder):
            write_manifest(folder, jobs, group)
            for job in jobs:
                if not job.done:
                    job.clear_folder()
            with SweepProgress(jobs, self.ahead, len(self.devices)) as progress, forward_signals(running):
                self.run(jobs, group, running, progress)
        return report_outcome(jobs, folder, progress, running.signal, last=not self.ahead)

    def run(self, jobs: list[Job], group: str, running: RunningJobs, progress: SweepProgress) -> None:
        """Keep every device busy until no job waits or a signal comes."""
        waiting = [job for job in jobs if not job.done]
        free = list(self.devices)
        while running.processes or (waiting and not running.signal):
            while waiting and free and not running.signal:
                job = waiting.pop(0)
                shorter = shorter_out_of_memory(job, jobs)
                if shorter:
                    progress.skipped(job, shorter)
                    continue
                device = free.pop(0)
                running.processes[job] = self.start(job, device, group), device
                progress.started(job)
            time.sleep(self.seconds_between_polls)
            for job, (process, device) in list(running.processes.items()):
                if process.poll() is not None:
                    del running.processes[job]
                    free.append(device)
                    progress.ended(job, process.returncode)
            progress.refresh(list(running.processes))

    def start(self, job: Job, device: str | None, group: str) -> subprocess.Popen[bytes]:
        """The job's process, which writes to console.log."""
        added = ["hydra.mode=RUN", f"hydra.run.dir={quoted(str(job.folder))}", "resume=auto"]
        added += [f"tracking.group={quoted(group)}"]
        hydra_overrides = [
            override for override in self.config.hydra.overrides.hydra if not override.startswith(SWEEP_OVERRIDES)
        ]
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / CONSOLE).open("ab") as console:
            return subprocess.Popen(
                [sys.executable, sys.argv[0], *without(job.overrides, ["tracking.group"]), *hydra_overrides, *added],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=self.environment(device),
                start_new_session=True,  # a terminal's Ctrl-C reaches it once, through `RunningJobs.forward`
            )

    def environment(self, device: str | None) -> dict[str, str]:
        """Where several jobs run at once, each gets its device and its share of the cores."""
        if self.devices == [None]:
            return dict(os.environ)
        gpu = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        return {"OMP_NUM_THREADS": str(self.threads), **os.environ, **gpu}

    def job(self, number: int, overrides: Sequence[str], folder: Path) -> Job:
        """The job that Hydra composes from `overrides`."""
        return job_of(self.loader.load_sweep_config(self.config, list(overrides)), number, overrides, folder)

    def folder(self, wanted: Sequence[Sequence[str]], resume: bool) -> Path:
        """hydra.sweep.dir; with resume=auto, the newest earlier sweep of the same jobs where there is one."""
        fresh = Path(self.config.hydra.sweep.dir)
        earlier = newest_sweep_of(fresh, wanted) if resume and not read_manifest(fresh) else None
        if earlier is None:
            return fresh
        (fresh / "multirun.yaml").unlink(missing_ok=True)  # Hydra has made the folder already
        for empty in (fresh, fresh.parent):
            if empty.is_dir() and not any(empty.iterdir()):
                empty.rmdir()
        return earlier

    def group(self, folder: Path) -> str:
        """The W&B group that the runs share: the experiment, and when the sweep was started."""
        experiment = self.config.hydra.runtime.choices.get("experiment") or "sweep"
        return "-".join([experiment, *folder.parts[-2:]])


def job_of(composed: DictConfig, number: int, overrides: Sequence[str], folder: Path) -> Job:
    """The job of a sweep in `folder` that `overrides` compose."""
    composed.hydra.job.num, composed.hydra.job.id = number, str(number)
    arena = composed.arena
    may_diverge = composed.attention.ablate.name != "none" or arena.arm is not None
    size = f", {arena.size} layers" if arena.size else ""
    name = f"{arena.arm}{size}, seed {composed.seed}" if arena.arm else ""
    if arena.stage == LR:
        name += f", optimizer.lr={composed.optimizer.lr:g}"
    run_folder = folder / str(composed.hydra.sweep.subdir)
    return Job(number, tuple(overrides), run_folder, composed.training.steps, may_diverge, name)


def report_outcome(
    jobs: list[Job], folder: Path, progress: SweepProgress, number: int, last: bool = True
) -> list[JobReturn]:
    """Report the outcome of the jobs and the next command; exit unless all of them are done.

    last  whether no other jobs follow; else there is nothing to report where all went well
    """
    left = [job for job in jobs if not (job.done or shorter_out_of_memory(job, jobs))]
    if not (last or left or number):
        return [job_return(job) for job in jobs]
    progress.table()
    again = [a for a in sys.argv if not a.startswith(("hydra.sweep.dir=", "resume="))]
    command = shlex.join(["python", *again, f"hydra.sweep.dir={folder}"])
    if number:
        progress.print(f"Stopped with {len(left)} of {len(jobs)} jobs left. Continue with:\n  {command}")
        sys.exit(128 + number)
    for job in left:
        progress.print(f"error: job {job.number} ({distinct_overrides(jobs)[job.number]}): {progress.reason(job)}")
    if left:
        progress.print(f"{len(left)} of {len(jobs)} jobs failed; run those again with:\n  {command}")
    progress.print(f"Compare the runs with:\n  python compare.py {shlex.quote(str(folder))}")
    if left:
        sys.exit(1)
    return [job_return(job) for job in jobs]


def job_return(job: Job) -> JobReturn:
    """The result that Hydra's sweeper expects of a job: its final validation loss."""
    result = JobReturn(overrides=list(job.overrides), working_dir=str(job.folder), status=JobStatus.COMPLETED)
    result.return_value = job.summary().get("val_loss")
    return result


def chosen_devices(gpus: Any, jobs: int = 1) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each job that may run at once; None leaves it unchanged. Raises SweepError."""
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise SweepError(f"hydra.launcher.jobs={jobs} must be a whole number from 1 on: the jobs that run at once.")
    if gpus is None:
        return [None] * jobs
    if jobs > 1:
        raise SweepError(f"hydra.launcher.jobs={jobs} is for jobs that share devices; leave it or gpus={gpus} out.")
    import torch  # imported here, because tab completion reads this file too, and importing torch takes too long for it

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    count = torch.cuda.device_count()
    numbers = range(count) if gpus == "all" else gpus
    if (
        isinstance(numbers, int | str)
        or not len(numbers)
        or not all(isinstance(n, int) and 0 <= n < count for n in numbers)
    ):
        there = f"the {count} GPUs that torch finds here are 0 to {count - 1}" if count else "torch finds no GPU here"
        raise SweepError(f"hydra.launcher.gpus={gpus} must be all, or a list such as [0,1]; {there}.")
    return [visible[n] for n in numbers]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quoted(value: str) -> str:
    """`value` as a quoted string in Hydra's grammar of overrides."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
