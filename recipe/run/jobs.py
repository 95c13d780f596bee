"""The jobs of a sweep: their overrides, and their state according to their run folders."""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.atomic import write_atomically
from data.untrusted import UntrustedError, read_json
from recipe.errors import UserError
from recipe.run.removed import as_today
from recipe.run.run_folder import check_not_running, last_line, read_overrides, read_summary

MANIFEST = "sweep.json"
# The backslashes with which Hydra writes the special characters of a swept value.
ESCAPES = re.compile(r"\\([\\()\[\]{}:=, \t])")
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
    may_diverge  whether a loss that is not finite is its result: of an ablated attention, or of an arm in an arena
    name         of an arena's job; empty: the overrides that not every job has
    """

    number: int
    overrides: tuple[str, ...]
    folder: Path
    may_diverge: bool = False
    name: str = ""

    def summary(self) -> dict[str, Any]:
        """summary.json; empty while there is none."""
        try:
            return read_summary(self.folder)
        except (OSError, UntrustedError):
            return {}

    @property
    def done(self) -> bool:
        """Whether it has a result. Running out of memory is one, and so may be a loss that is not finite."""
        summary = self.summary()
        not_finite = summary.get("non_finite_step") is not None
        return summary.get("status") in ("completed", "out_of_memory") or (self.may_diverge and not_finite)

    def failure_message(self) -> str:
        """Why it failed: the message in its summary, else the last line of its console."""
        return str(self.summary().get("message") or last_line(self.folder)).removeprefix("error: ").strip()

    def check_folder(self) -> None:
        """Raise SweepError where the folder holds another job's run, StillRunning where that runs. Changes nothing."""
        if not self.folder.exists():
            return
        check_not_running(self.folder)
        recorded = recorded_overrides(self.folder)
        ours = {line for line in without(self.overrides, LAUNCHER_OVERRIDES) if "${" not in line}  # as it records them
        other = recorded is not None and recorded != ours
        if other or (recorded is None and (self.folder / "metrics.jsonl").exists()):
            of = "a run without its overrides" if recorded is None else f"the run of {' '.join(sorted(recorded))}"
            raise SweepError(
                f"{self.folder} holds {of}, not of {' '.join(self.overrides)}; repeat the sweep's overrides, or name "
                "another folder with hydra.sweep.dir."
            )

    def clear_folder(self) -> None:
        """Remove the folder of a run that died before its first checkpoint, so that the job can start again."""
        if recorded_overrides(self.folder) is not None and not any(self.folder.glob("checkpoints/step-*")):
            shutil.rmtree(self.folder)


def recorded_overrides(folder: Path) -> set[str] | None:
    """The overrides of the run in `folder`, without the launcher's; None where none are recorded."""
    try:
        return set(without(as_today(read_overrides(folder)), LAUNCHER_OVERRIDES))
    except (OSError, UntrustedError):
        return None


def without(overrides: Iterable[str], keys: Iterable[str]) -> list[str]:
    """`overrides` without the ones of `keys`."""
    return [override for override in overrides if override.split("=")[0].lstrip("+~") not in keys]


def names_of(jobs: Sequence[Job]) -> dict[int, str]:
    """What distinguishes each job, by its number: its name, or the overrides that not every job has, "tiled seed=2"."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    names = {}
    for job in jobs:
        different = [line for line in job.overrides if line not in common] or job.overrides
        names[job.number] = job.name or ESCAPES.sub(r"\1", " ".join(x.removeprefix("attention=") for x in different))
    return names


def write_manifest(folder: Path, jobs: Sequence[Job]) -> None:
    """Write the jobs and their names to `folder`/sweep.json."""
    content = {"jobs": [job.overrides for job in jobs], "names": names_of(jobs)}  # JSON has the numbers as text
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest that `write_manifest` wrote; empty where there is none."""
    try:
        content = read_json(folder / MANIFEST)
    except (OSError, UntrustedError):
        return {}
    return content if isinstance(content, dict) else {}


def failed_job(error: RuntimeError) -> SweepError | None:
    """A sentence for submitit's error about a job that failed; None for any other error."""
    if type(error).__name__ != "UncompletedJobError":  # submitit need not be installed
        return None
    return SweepError(
        f"a job of the sweep failed: {str(error).strip().splitlines()[-1].removeprefix('error: ')} The others are not "
        "affected; each one's output is in .submitit/ in the sweep's folder."
    )
