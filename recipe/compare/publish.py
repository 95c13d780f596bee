"""The report in Weights & Biases: a summary run in the group of the runs, with the figures and the tables.

W&B works in a separate process with a time limit. The report on disk is complete in any case.
"""

from __future__ import annotations

import csv
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.compare.runs import Run

MODES = ("online", "offline", "disabled")
SECONDS = 90
ROOT = Path(__file__).parents[2]


def mode_of(runs: Sequence[Run]) -> str:
    """The tracking.mode of most runs; disabled if none recorded it."""
    ((mode, _),) = Counter(str(run.option("tracking.mode", "disabled")) for run in runs).most_common(1)
    return mode if mode in MODES else "disabled"


def publish(runs: Sequence[Run], out: Path, mode: str, seconds: float = SECONDS) -> str:
    """Log the report in `out` to W&B, within `seconds`. Returns a sentence on the outcome; never raises.

    The run joins the group that the runs share, so that their workspace shows the comparison.
    """
    groups = Counter(str(group) for run in runs if (group := run.option("tracking.group")))
    project = str(runs[0].option("tracking.project", "gpt-attention"))
    group = groups.most_common(1)[0][0] if groups else ""
    command = [sys.executable, "-m", "recipe.compare.publish", str(out.resolve()), mode, project, group]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"W&B did not answer within {seconds:g} s; the report on disk is complete."
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"W&B could not take the report ({reason}); the report on disk is complete."
    return f"W&B: {done.stdout.strip().splitlines()[-1]}"


def run_id(group: str) -> str | None:
    """The id of the reports on a group, of which W&B keeps one run; None without a group: each report is a new run."""
    return f"report-{hashlib.sha256(group.encode()).hexdigest()[:16]}" if group else None


def main(out: Path, mode: Any, project: str, group: str) -> None:
    """Log the report in `out`. A later report on the same group replaces it."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", disable_code=True, init_timeout=30)
    run = wandb.init(
        project=project, group=group or None, job_type="report", name="report", id=run_id(group), mode=mode,
        dir=str(out), settings=settings,
    )  # fmt: skip
    for figure in sorted((out / "figures").glob("*.png")):
        if not figure.stem.endswith("-dark"):
            run.log({f"report/{figure.stem}": wandb.Image(str(figure))}, step=0)
    for path in sorted(out.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        run.log({f"report/{path.stem}": wandb.Table(columns=list(head), data=rows)}, step=0)
    run.log({"report/page": wandb.Html(str(out / "index.html"))}, step=0)
    location = run.url or f"wandb sync {Path(run.dir).parent}"
    run.finish()
    print(location)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
