"""The queue of a sweep: every job is a separate process, so that no job inherits anything from the one before.

Peak memory, compiled graphs, the allocator's cache and the W&B run belong to a process. So the queue starts
`python train.py <overrides>` for each job, one after the other, one on each GPU or several on the cores, and reports
the outcome of each. A job whose folder holds a result is skipped.

submitit's local executor starts all jobs at once, and joblib's workers run several in one process; neither gives each
job a GPU, forwards signals, goes on after a failure or resumes a sweep. On a Slurm cluster Hydra's submitit launcher
takes the jobs.
"""

import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from data.atomic import write_atomically
from recipe import CONF
from recipe.run.compose import quoted
from recipe.run.jobs import Job, SweepError, names_of, without, write_manifest
from recipe.run.progress import Terminal
from recipe.run.run_folder import CONSOLE, locked
from recipe.wording import duration

SECONDS_BETWEEN_POLLS = 0.2
# Hydra's overrides that describe the sweep; its jobs get the others.
SWEEP_OVERRIDES = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra.launcher", "hydra/launcher")
# The first asks a job to finish its step, the second to stop at once; the third is a SIGKILL.
SIGNALS_BEFORE_KILL = 2


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


class Report:
    """Prints a line at each job's start and end, and at the end of the sweep what failed and the next command.

    ahead    jobs that follow these
    at_once  number of jobs that run at the same time
    """

    def __init__(self, jobs: Sequence[Job], ahead: int, at_once: int) -> None:
        self.jobs, self.ahead, self.at_once, self.names = jobs, ahead, at_once, names_of(jobs)
        self.console = Terminal()
        self.began: dict[Job, float] = {}
        self.codes: dict[Job, int] = {}
        self.took: list[float] = []  # seconds of each job that came to its end here
        done = [job for job in jobs if job.done]
        self.left = len(jobs) - len(done) + ahead
        finished = f", {len(done)} of them done already" if done else ""
        follow = f"; {ahead} follow" if ahead else ""
        self.print(f"{len(jobs)} job{'s' if len(jobs) != 1 else ''}{finished}{follow}")

    def print(self, text: str) -> None:
        self.console.print(text, markup=False)

    def started(self, job: Job) -> None:
        self.began[job] = time.monotonic()
        self.print(self.label(job))

    def ended(self, job: Job, code: int) -> None:
        """`code` is the process's exit status, negative for a signal."""
        took = time.monotonic() - self.began[job]
        self.codes[job], self.left = code, self.left - 1
        self.took += [took] if job.done else []
        seconds = statistics.fmean(self.took) * self.left / self.at_once if self.took else 0.0
        left = f"  {duration(seconds)} left" if seconds else ""
        self.print(f"{self.label(job)}: {outcome(job)}, {duration(took)}{left}")

    def label(self, job: Job) -> str:
        """ "[3/9]  tiled seed=2", counted from 1."""
        return f"[{job.number + 1}/{self.jobs[-1].number + 1 + self.ahead}]  {self.names[job.number]}"

    def close(self, folder: Path, number: int) -> None:
        """Report the outcome and the next command; exit unless all jobs are done. `number` is that of a signal."""
        left = [job for job in self.jobs if not job.done]
        again = [a for a in sys.argv if not a.startswith("hydra.sweep.dir=")]
        command = shlex.join(["python", *again, f"hydra.sweep.dir={folder}"])
        if number:
            self.print(f"Stopped with {len(left)} of {len(self.jobs)} jobs left. Continue with:\n  {command}")
            sys.exit(128 + number)
        for job in left:
            self.print(f"error: job {job.number} ({self.names[job.number]}): {failure(job, self.codes[job])}")
        if left:
            self.print(f"{len(left)} of {len(self.jobs)} jobs failed; run those again with:\n  {command}")
        if left or not self.ahead:
            self.print(f"Compare the runs with:\n  python compare.py {shlex.quote(str(folder))}")
        if left:
            sys.exit(1)


def outcome(job: Job) -> str:
    """The outcome of a job in a few words."""
    summary = job.summary()
    status = summary.get("status", "failed")
    if status == "completed":
        loss = summary.get("val_loss") or summary.get("train_loss")
        return f"loss {float(loss):.4f}" if loss is not None else "completed"
    if status == "failed" and job.done:
        return "loss not finite, which is its result"
    return str(status).replace("_", " ")


def failure(job: Job, code: int) -> str:
    """Why a job failed, in one sentence. `code` is the exit status of its process."""
    if code < 0 and job.summary().get("status") != "failed":
        memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"it was ended by {signal.Signals(-code).name}{memory}."
    return job.failure_message()


class Queue:
    """Runs the jobs of a sweep.

    folder   the sweep's
    devices  CUDA_VISIBLE_DEVICES for each job that may run at once; None leaves it unchanged
    """

    def __init__(self, cfg: DictConfig) -> None:
        """`cfg` as Hydra composes it. Raises SweepError for GPUs that are not there, and where Slurm is not."""
        self.cfg, self.folder, options = cfg, Path(cfg.hydra.sweep.dir), cfg.hydra.launcher
        self.by_hydra = str(options.get("_target_", ""))
        if self.by_hydra.endswith(".SlurmLauncher") and shutil.which("srun") is None:
            raise SweepError(
                "hydra/launcher=slurm needs a machine of a Slurm cluster, and srun is not installed here; "
                "use hydra/launcher=process or gpus."
            )
        self.devices = [None] if self.by_hydra else chosen_devices(options.gpus, options.jobs)
        self.threads = 1  # of each job, where several run at once

    def run(self, jobs: Sequence[Job], train: Any = None, ahead: int = 0) -> None:
        """Run the jobs that are not done yet, also after one of them fails.

        train  the function that trains, which Hydra's launcher calls
        ahead  jobs that follow in another call

        Exits with status 1 if one failed, with 128 + n after signal n. Raises SweepError where a job's folder holds
        something else, StillRunning where the sweep or one of its jobs runs already.
        """
        if not jobs:
            return
        for job in jobs:
            job.check_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            write_atomically(self.folder / "multirun.yaml", OmegaConf.to_yaml(self.cfg))
            if self.by_hydra:
                self.submit(jobs, train)
                return
            write_manifest(self.folder, jobs)
            running, report = RunningJobs(), Report(jobs, ahead, len(self.devices))
            # The cores that this process may use, shared.
            self.threads = max(1, len(os.sched_getaffinity(0)) // min(len(self.devices), len(jobs)))
            with forward_signals(running):
                self.work([job for job in jobs if not job.done], running, report)
        report.close(self.folder, running.signal)

    def submit(self, jobs: Sequence[Job], train: Any) -> None:
        """Have Hydra's launcher run the jobs."""
        # Its processes import this checkout, whatever their working directory.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CONF.parent), os.environ.get("PYTHONPATH")]))
        with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
            context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=train, config=self.cfg
            )
            launcher.launch([[*job.overrides, "resume=auto"] for job in jobs], initial_job_idx=jobs[0].number)

    def work(self, waiting: list[Job], running: RunningJobs, report: Report) -> None:
        """Keep every device busy until no job waits or a signal comes."""
        free = list(self.devices)
        while running.processes or (waiting and not running.signal):
            while waiting and free and not running.signal:
                job, device = waiting.pop(0), free.pop(0)
                job.clear_folder()
                running.processes[job] = self.start(job, device), device
                report.started(job)
            time.sleep(SECONDS_BETWEEN_POLLS)
            for job, (process, device) in list(running.processes.items()):
                if process.poll() is not None:
                    del running.processes[job]
                    free.append(device)
                    report.ended(job, process.returncode)

    def start(self, job: Job, device: str | None) -> subprocess.Popen[bytes]:
        """The job's process, which writes to console.log."""
        hydra = [line for line in self.cfg.hydra.overrides.hydra if not line.startswith(SWEEP_OVERRIDES)]
        hydra += ["hydra.mode=RUN", f"hydra.run.dir={quoted(str(job.folder))}"]
        added = ["resume=auto", f"tracking.group={quoted(self.group())}"]
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / CONSOLE).open("ab") as console:
            return subprocess.Popen(
                [sys.executable, sys.argv[0], *without(job.overrides, ["tracking.group"]), *hydra, *added],
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

    def group(self) -> str:
        """The W&B group that the runs share: tracking.group, or the experiment and when the sweep was started."""
        experiment = self.cfg.hydra.runtime.choices.get("experiment") or "sweep"
        return self.cfg.tracking.group or "-".join([experiment, *Path(self.cfg.hydra.sweep.dir).parts[-2:]])


def chosen_devices(gpus: str | None, jobs: int = 1) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each job that may run at once; None leaves it unchanged. Raises SweepError."""
    if jobs < 1 or (gpus is not None and jobs > 1):
        raise SweepError(f"hydra.launcher.jobs={jobs} must be at least 1, and 1 with hydra.launcher.gpus={gpus}.")
    if gpus is None:
        return [None] * jobs
    count = torch.cuda.device_count()
    if gpus != "all" or not count:
        found = f"torch finds {count} GPUs; start the sweep with CUDA_VISIBLE_DEVICES=0,1 to use some of them"
        raise SweepError(f"hydra.launcher.gpus={gpus} must be all, on a machine with GPUs: {found}.")
    return list(os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count])
