"""The page in Weights & Biases: an artifact of a run in the group of the compared runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.compare.runs import Run
from recipe.run.wandb_thread import WandbThread

MODES = ("online", "offline", "disabled")
LIMIT = 90.0  # seconds for W&B to take the page


def mode_of(runs: Sequence[Run]) -> str:
    """The tracking.mode of the first run; disabled if it recorded none."""
    mode = str(runs[0].option("tracking.mode"))
    return mode if mode in MODES else "disabled"


def publish(runs: Sequence[Run], out: Path, mode: str) -> str:
    """Log the page in `out` to W&B. Returns sentences on the outcome, after at most LIMIT seconds; never raises.

    The run joins the group of the first run, so that their workspace has the page.
    """
    names = {"job_type": "report", "name": "report", "resume": None}
    group = str(runs[0].option("tracking.group") or "") or None
    project = str(runs[0].option("tracking.project", "gpt-attention"))

    def add_page(run: Any, step: int) -> None:
        import wandb

        page = wandb.Artifact("report", type="report")
        page.add_file(str(out / "index.html"))
        run.log_artifact(page)

    options = {"mode": mode, "project": project, "group": group, **names}
    thread = WandbThread(out, options, add_page, "the report on disk is complete")
    thread.end(True, LIMIT)
    return "\n".join([*thread.warnings(), *([f"W&B: {thread.location}"] if thread.location else [])])
