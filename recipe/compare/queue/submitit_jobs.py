"""Support for Hydra's submitit launcher: jobs that find this checkout, and a sentence for one that failed."""

from __future__ import annotations

import os
from pathlib import Path

from recipe.compare.queue.jobs import SweepError

ROOT = Path(__file__).parents[3]


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
