"""A sweep whose every job is a process of its own: `python train.py -m ...` without what one job leaves to the next.

Peak memory, compiled graphs, the allocator's cache and the W&B run belong to a process. So the launcher only starts
`python train.py <overrides>`, one after the other or one on each GPU, watches metrics.jsonl grow, and says in the end
what became of each job. It is a Hydra launcher, the default of conf/config.yaml.
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

from training.sweeps.jobs import (
    CONSOLE,
    Job,
    SweepError,
    newest_like,
    read_manifest,
    too_long,
    varied,
    without,
    write_manifest,
)
from training.sweeps.progress import SweepProgress

SECONDS_BETWEEN_LOOKS = 0.2
# Overrides of Hydra's that describe the sweep; its jobs get the others.
OF_THE_SWEEP = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher", "hydra/sweeper")
# Signals to a job: the second makes it stop at once, and the third cannot be ignored.
PATIENCE = 2


@dataclass
class ProcessLauncherConfig:
    """What a user chooses under `hydra.launcher.*`.

    gpus  null: one job at a time, with every GPU in sight; all, or a list such as [0,1]: one job on each of them
    """

    _target_: str = "hydra_plugins.process_launcher.ProcessLauncher"
    gpus: Any = None


def register() -> None:
    """Make `hydra/launcher=process` known to Hydra in this process, with nothing to install."""
    Plugins.instance().register(ProcessLauncher)
    ConfigStore.instance().store(group="hydra/launcher", name="process", node=ProcessLauncherConfig)


@dataclass
class Children:
    """The processes that run, each with its device, and the last signal that came for them."""

    running: dict[Job, tuple[subprocess.Popen[bytes], str | None]] = field(default_factory=dict)
    signal: int = 0
    signals: int = 0

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on. A job finishes its step, writes a checkpoint and ends."""
        self.signal, self.signals = number, self.signals + 1
        for process, _ in self.running.values():
            process.send_signal(number if self.signals <= PATIENCE else signal.SIGKILL)


@contextmanager
def forwarding(children: Children) -> Iterator[None]:
    """While active, what would end this process asks its children to end first."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, children.forward) for number in numbers}
    try:
        yield
    finally:
        for process, _ in children.running.values():  # none, unless something went wrong here
            process.terminate()
        for number, handler in handlers.items():
            signal.signal(number, handler)


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep. See ProcessLauncherConfig for its options."""

    __module__ = "hydra_plugins.process_launcher"  # Hydra takes launchers from this package only

    def __init__(self, gpus: Any = None) -> None:
        """Raises SweepError for GPUs that are not there."""
        self.devices = chosen_devices(gpus)

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that are not done already; go on after one that fails.

        Exits with status 1 if one failed, with 128 + n after signal n. Raises SweepError where a job's folder holds
        something else.
        """
        resume = any(override == "resume=auto" for job in job_overrides for override in job)
        wanted = [without(job, ["resume"]) for job in job_overrides] if resume else [list(job) for job in job_overrides]
        folder = self.folder(wanted, resume)
        jobs = [self.job(initial_job_idx + i, overrides, folder) for i, overrides in enumerate(wanted)]
        group = self.config.tracking.group or read_manifest(folder).get("group") or self.group(folder)
        write_manifest(folder, jobs, group)
        for job in jobs:
            if not job.done:
                job.clear_the_way()
        children = Children()
        with SweepProgress(jobs) as progress, forwarding(children):
            self.run(jobs, group, children, progress)
        return conclude(jobs, folder, progress, children.signal)

    def run(self, jobs: list[Job], group: str, children: Children, progress: SweepProgress) -> None:
        """Keep every device busy until no job waits, or a signal came."""
        waiting = [job for job in jobs if not job.done]
        free = list(self.devices)
        while children.running or (waiting and not children.signal):
            while waiting and free and not children.signal:
                job = waiting.pop(0)
                shorter = too_long(job, jobs)
                if shorter:
                    progress.passed_over(job, shorter)
                    continue
                device = free.pop(0)
                children.running[job] = self.start(job, device, group), device
                progress.started(job)
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for job, (process, device) in list(children.running.items()):
                if process.poll() is not None:
                    del children.running[job]
                    free.append(device)
                    progress.ended(job, process.returncode)
            progress.refresh(list(children.running))

    def start(self, job: Job, device: str | None, group: str) -> subprocess.Popen[bytes]:
        """The job's process, which writes to console.log."""
        added = ["hydra.mode=RUN", f"hydra.run.dir={quoted(str(job.folder))}", "resume=auto"]
        added += [f"tracking.group={quoted(group)}"]
        kept = [override for override in self.config.hydra.overrides.hydra if not override.startswith(OF_THE_SWEEP)]
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / CONSOLE).open("ab") as console:
            return subprocess.Popen(
                [sys.executable, sys.argv[0], *without(job.overrides, ["tracking.group"]), *kept, *added],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=self.environment(device),
                start_new_session=True,  # a terminal's Ctrl-C reaches it once, through `Children.forward`
            )

    def environment(self, device: str | None) -> dict[str, str]:
        """A device of its own for each of several jobs, and its share of the cores."""
        if device is None:
            return dict(os.environ)
        threads = max(1, (os.cpu_count() or 1) // len(self.devices))
        return {"OMP_NUM_THREADS": str(threads), **os.environ, "CUDA_VISIBLE_DEVICES": device}

    def job(self, number: int, overrides: Sequence[str], folder: Path) -> Job:
        """A job as Hydra composes it."""
        composed = self.loader.load_sweep_config(self.config, list(overrides))
        composed.hydra.job.num, composed.hydra.job.id = number, str(number)
        subdir = str(composed.hydra.sweep.subdir)
        ablated = composed.attention.ablate.name != "none"
        return Job(number, tuple(overrides), folder / subdir, composed.training.steps, ablated)

    def folder(self, wanted: Sequence[Sequence[str]], resume: bool) -> Path:
        """hydra.sweep.dir; with resume=auto, the newest earlier sweep of the same jobs where there is one."""
        fresh = Path(self.config.hydra.sweep.dir)
        earlier = newest_like(fresh, wanted) if resume and not read_manifest(fresh) else None
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


def conclude(jobs: list[Job], folder: Path, progress: SweepProgress, number: int) -> list[JobReturn]:
    """Say what became of the jobs and what to do next; exit unless every one is done."""
    left = [job for job in jobs if not (job.done or too_long(job, jobs))]
    progress.table()
    again = [a for a in sys.argv if not a.startswith(("hydra.sweep.dir=", "resume="))]
    command = shlex.join(["python", *again, f"hydra.sweep.dir={folder}"])
    if number:
        progress.say(f"Stopped with {len(left)} of {len(jobs)} jobs left. Go on with:\n  {command}")
        sys.exit(128 + number)
    for job in left:
        progress.say(f"error: job {job.number} ({varied(jobs)[job.number]}): {progress.reason(job)}")
    if left:
        progress.say(f"{len(left)} of {len(jobs)} jobs failed; try those again with:\n  {command}")
    progress.say(f"Compare the runs with:\n  python compare.py {shlex.quote(str(folder))}")
    if left:
        sys.exit(1)
    return [returned(job) for job in jobs]


def returned(job: Job) -> JobReturn:
    """What Hydra's sweeper expects of a job; its value is the final validation loss."""
    result = JobReturn(overrides=list(job.overrides), working_dir=str(job.folder), status=JobStatus.COMPLETED)
    result.return_value = job.summary().get("val_loss")
    return result


def chosen_devices(gpus: Any) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each place for a job; None leaves it as it is. Raises SweepError."""
    if gpus is None:
        return [None]
    import torch  # here, as completion reads this file too, and torch's import takes longer than one waits for a TAB

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


def quoted(value: str) -> str:
    """As a string in Hydra's grammar of overrides."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
