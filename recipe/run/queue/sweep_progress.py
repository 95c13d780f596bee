"""Progress of a sweep: a live bar in a terminal, a line at each job's start and end in a log."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn

from recipe.run.progress import Terminal
from recipe.run.queue.jobs import Job, distinct_overrides, shorter_out_of_memory
from recipe.wording import duration


class SweepProgress:
    """Shows the progress and the outcome of a sweep's jobs."""

    def __init__(self, jobs: Sequence[Job], ahead: int = 0, at_once: int = 1) -> None:
        """
        ahead    jobs that follow after these
        at_once  number of jobs that run at the same time
        """
        self.jobs, self.names, self.ahead, self.at_once = jobs, distinct_overrides(jobs), ahead, at_once
        self.console = Terminal()
        self.began: dict[Job, float] = {}
        self.codes: dict[Job, int] = {}
        self.over = {job for job in jobs if job.done}
        self.took: list[float] = []  # seconds of each job that came to its end here
        self.bar = Progress(
            BarColumn(bar_width=24), TextColumn("{task.description}"), console=self.console, auto_refresh=False
        )
        self.task = self.bar.add_task("", total=float(self.before + len(jobs) + ahead))

    def __enter__(self) -> SweepProgress:
        finished = f", {len(self.over)} of them done already" if self.over else ""
        follow = f"; {self.ahead} follow" if self.ahead else ""
        self.print(f"{len(self.jobs)} job{'s' if len(self.jobs) != 1 else ''}{finished}{follow}")
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self.console.print(text, markup=False)

    def started(self, job: Job) -> None:
        self.began[job] = time.monotonic()
        self.print(f"{self.label(job)}  {self.names[job.number]}")

    def skipped(self, job: Job, shorter: Job) -> None:
        self.over.add(job)
        self.print(
            f"{self.label(job)}  {self.names[job.number]}: skipped, because job {shorter.number} ran out of memory"
        )

    def ended(self, job: Job, code: int) -> None:
        """`code` is the process's exit status, negative for a signal."""
        self.codes[job] = code
        self.over.add(job)
        took = time.monotonic() - self.began[job]
        if job.done:
            self.took.append(took)
        left = self.seconds_left()
        ahead = "" if left is None else f"  {duration(left)} left"
        self.print(f"{self.label(job)}  {self.names[job.number]}: {self.outcome(job)}, {duration(took)}{ahead}")

    def seconds_left(self) -> float | None:
        """The time until all jobs have ended, those of later stages included, if they take as long as the ones before.
        None before the first job has ended, and after the last."""
        left = len(self.jobs) - len(self.over) + self.ahead
        return statistics.fmean(self.took) * left / self.at_once if self.took and left else None

    def refresh(self, running: Sequence[Job]) -> None:
        """Redraw the bar."""
        if not self.console.is_terminal:
            return
        lines, share = [], 0.0
        for job in running:
            latest = job.latest()
            step, loss = latest.get("step", 0), latest.get("train/loss")
            share += step / job.steps
            text = f"step {step}/{job.steps}" + (f"  loss {float(loss):.4f}" if loss is not None else "")
            lines.append(f"{self.label(job)}  {self.names[job.number]}  {text}")
        left = self.seconds_left()
        if left is not None:
            left = max(0.0, left - share * statistics.fmean(self.took) / self.at_once)
            lines.append(f"{duration(left)} left")
        self.bar.update(
            self.task, completed=self.before + len(self.over) + share, description="  |  ".join(lines), refresh=True
        )

    @property
    def before(self) -> int:
        """Jobs of the sweep that were launched before these."""
        return self.jobs[0].number if self.jobs else 0

    def label(self, job: Job) -> str:
        """ "[3/9]", counted from 1."""
        return f"[{job.number + 1}/{self.before + len(self.jobs) + self.ahead}]"

    def outcome(self, job: Job) -> str:
        """The outcome of a job in a few words."""
        summary, status = job.summary(), job.status
        if status == "completed":
            loss = summary.get("val_loss") or summary.get("train_loss")
            return f"loss {float(loss):.4f}" if loss is not None else "completed"
        if job.done:
            return "out of memory" if status == "out_of_memory" else "loss not finite, which is its result"
        if shorter_out_of_memory(job, self.jobs):
            return "skipped: a shorter one ran out of memory"
        if job in self.codes:
            return "interrupted" if status == "interrupted" else "failed"
        return "not run"

    def reason(self, job: Job) -> str:
        """Why a job failed, in one sentence."""
        code = self.codes.get(job, 0)
        if code < 0 and job.status != "failed":
            memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
            return f"it was ended by {signal.Signals(-code).name}{memory}."
        return job.failure_message()

    def table(self) -> None:
        """The outcome of every job."""
        rows = [(str(job.number), self.names[job.number], self.outcome(job), str(job.folder)) for job in self.jobs]
        rows.insert(0, ("job", "overrides", "outcome", "run folder"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        self.print("")
        for row in rows:
            self.print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
