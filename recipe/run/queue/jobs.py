"""The jobs of a sweep: their overrides, and their state according to their run folders."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.untrusted import UntrustedError, parse_json, read_end, read_json
from recipe.errors import UserError
from recipe.run.run_folder import check_not_running, read_overrides, read_summary

ROOT = Path(__file__).parents[3]
MANIFEST = "sweep.json"
CONSOLE = "console.log"
# Overrides that the launcher adds to a job's; the run records them too.
LAUNCHER_OVERRIDES = ("resume", "tracking.group")


class SweepError(UserError, RuntimeError):
    """A sweep that cannot be started as asked; the message says what to change."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    number       its place in the sweep, from 0
    overrides    as on the command line, without Hydra's
    folder       its run folder
    steps        updates it will make
    may_diverge  whether a loss that is not finite is its result: of an ablated attention, or of an arm in an arena
    name         shown by the progress; empty: the overrides that not every job has
    """

    number: int
    overrides: tuple[str, ...]
    folder: Path
    steps: int
    may_diverge: bool = False
    name: str = ""

    def summary(self) -> dict[str, Any]:
        """summary.json; empty while there is none."""
        try:
            return read_summary(self.folder)
        except (OSError, UntrustedError):
            return {}

    @property
    def status(self) -> str:
        """completed, out_of_memory, interrupted, failed; unfinished where no summary was written."""
        return self.summary().get("status", "unfinished")

    @property
    def done(self) -> bool:
        """Whether it has a result. Running out of memory is one, and so may be a loss that is not finite."""
        summary = self.summary()
        not_finite = summary.get("non_finite_step") is not None
        return summary.get("status") in ("completed", "out_of_memory") or (self.may_diverge and not_finite)

    def latest(self) -> dict[str, Any]:
        """The last whole line of metrics.jsonl that has a training loss."""
        try:
            lines = read_end(self.folder / "metrics.jsonl", 8192).splitlines()
        except (OSError, UntrustedError):
            return {}
        for line in reversed(lines):
            try:
                record = parse_json(line)
            except UntrustedError:  # half a line, at either end
                continue
            if isinstance(record, dict) and "train/loss" in record:
                return record
        return {}

    def failure_message(self) -> str:
        """Why it failed: the message in its summary, else the last line of its console."""
        message = self.summary().get("message")
        if message:
            return str(message)
        try:
            lines = [line for line in read_end(self.folder / CONSOLE).splitlines() if line.strip()]
        except (OSError, UntrustedError):
            lines = []
        return lines[-1].removeprefix("error: ").strip() if lines else "it ended without a message."

    def check_folder(self) -> None:
        """Raise SweepError where the folder holds another job's run, StillRunning where that runs. Changes nothing."""
        if not self.folder.exists():
            return
        check_not_running(self.folder)
        recorded = recorded_overrides(self.folder)
        if recorded is None and (self.folder / "metrics.jsonl").exists():
            raise SweepError(
                f"{self.folder} holds a run without its overrides; name another folder with hydra.sweep.dir."
            )
        if recorded is not None and recorded != set(without(self.overrides, LAUNCHER_OVERRIDES)):
            raise SweepError(
                f"{self.folder} holds the run of {' '.join(sorted(recorded))}, not of {' '.join(self.overrides)}; "
                "repeat the sweep's overrides, or name another folder with hydra.sweep.dir."
            )

    def clear_folder(self) -> None:
        """Remove the folder of a run that died before its first checkpoint, so that the job can start again."""
        if recorded_overrides(self.folder) is not None and not any(self.folder.glob("checkpoints/step-*")):
            shutil.rmtree(self.folder)


def recorded_overrides(folder: Path) -> set[str] | None:
    """The overrides of the run in `folder`, without the launcher's; None where none are recorded."""
    try:
        return set(without(read_overrides(folder), LAUNCHER_OVERRIDES))
    except (OSError, UntrustedError):
        pass
    try:
        recorded = read_summary(folder).get("overrides")  # a model too large for the memory leaves only this
    except (OSError, UntrustedError):
        return None
    return set(without(map(str, recorded), LAUNCHER_OVERRIDES)) if isinstance(recorded, list) else None


def without(overrides: Iterable[str], keys: Iterable[str]) -> list[str]:
    """`overrides` without the ones of `keys`."""
    return [override for override in overrides if override.split("=")[0].lstrip("+~") not in keys]


def shorter_out_of_memory(job: Job, jobs: Sequence[Job]) -> Job | None:
    """The job that differs from `job` only in a shorter seq_len, and already ran out of memory."""
    seq_len, rest = _seq_len(job)
    for other in jobs:
        shorter, others = _seq_len(other)
        if seq_len and shorter and shorter < seq_len and others == rest and other.status == "out_of_memory":
            return other
    return None


def _seq_len(job: Job) -> tuple[int | None, list[str]]:
    values = [o.split("=")[1] for o in job.overrides if o.startswith("seq_len=")]
    return (int(values[0]) if values else None), without(job.overrides, ["seq_len"])


def distinct_overrides(jobs: Sequence[Job]) -> dict[int, str]:
    """A text that distinguishes each job, by its number: its name, or the overrides that not every job has,
    "attention=tiled seed=2". The second of two equal jobs is a repeat, "attention=tiled seed=2, repeat 1"."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    texts, seen = dict[int, str](), Counter[str]()
    for job in jobs:
        different = [override for override in job.overrides if override not in common]
        text = job.name or " ".join(different or job.overrides) or "the only job"
        texts[job.number] = f"{text}, repeat {seen[text]}" if seen[text] else text
        seen[text] += 1
    return texts


def write_manifest(folder: Path, jobs: Sequence[Job], group: str) -> None:
    """Write the sweep's jobs and W&B group to `folder`/sweep.json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"group": group, "jobs": [list(job.overrides) for job in jobs]}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that `write_manifest` wrote; empty where there is none."""
    try:
        content = read_json(folder / MANIFEST)
    except (OSError, UntrustedError):
        return {}
    return content if isinstance(content, dict) else {}


def recorded_group(folder: Path) -> str | None:
    """The W&B group in the manifest; None without one, and for one that would refer to other values."""
    group = read_manifest(folder).get("group")
    return group if isinstance(group, str) and "${" not in group else None


def newest_sweep_of(folder: Path, overrides: Sequence[Sequence[str]]) -> Path | None:
    """The newest sweep beside `folder` (multirun/<date>/<time>) that has exactly the jobs of `overrides`."""
    wanted = [list(job) for job in overrides]
    sweeps = sorted(folder.parent.parent.glob(f"*/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path.parent for path in sweeps if read_manifest(path.parent).get("jobs") == wanted), None)


def share_checkout() -> None:
    """Let the processes started from now on import this checkout, whatever their working directory."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def failed_job(error: RuntimeError) -> SweepError | None:
    """A sentence for submitit's error about a job that failed; None for any other error."""
    if type(error).__name__ != "UncompletedJobError":  # submitit need not be installed
        return None
    reason = str(error).strip().splitlines()[-1].removeprefix("error: ")
    return SweepError(
        f"a job of the sweep failed: {reason} The others are not affected; each one's output is in .submitit/ in the "
        "sweep's folder."
    )
