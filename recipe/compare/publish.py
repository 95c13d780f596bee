"""The page in Weights & Biases: an artifact of a run in the group of the compared runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.compare.runs import Run

MODES = ("online", "offline", "disabled")
LIMIT = 90.0  # seconds for W&B to take the page


def mode_of(runs: Sequence[Run]) -> str:
    """The tracking.mode of the first run; disabled if it recorded none."""
    mode = str(runs[0].option("tracking.mode"))
    return mode if mode in MODES else "disabled"


def publish(runs: Sequence[Run], out: Path, mode: str) -> str:
    """Log the page in `out` to W&B. Returns a sentence on the outcome, after at most LIMIT seconds; never raises.

    The run joins the group of the first run, so that their workspace has the page.
    """
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(_log(runs, out, mode)), daemon=True)
    thread.start()
    thread.join(LIMIT)
    return said[0] if said else f"W&B did not answer for {LIMIT:g} seconds; the report on disk is complete."


def _log(runs: Sequence[Run], out: Path, mode: Any) -> str:
    group = str(runs[0].option("tracking.group") or "")
    project = str(runs[0].option("tracking.project", "gpt-attention"))
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=LIMIT / 3)
        run = wandb.init(
            project=project, group=group or None, job_type="report", name="report", mode=mode,
            dir=str(out), settings=settings,
        )  # fmt: skip
        page = wandb.Artifact("report", type="report")
        page.add_file(str(out / "index.html"))
        run.log_artifact(page)
        location = run.url or f"wandb sync {Path(run.dir).parent}"
        run.finish()
    except Exception as error:
        return f"W&B could not take the report ({type(error).__name__}: {error}); the report on disk is complete."
    return f"W&B: {location}"
