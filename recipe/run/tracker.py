"""Records a run: metrics.jsonl, the progress line and W&B; at the end summary.json and the loss curve.

    tracker = Tracker(run_folder, config.tracking, recorded=as_plain_dicts, steps=2000, resume_step=None)
    with tracker:                                  # whatever happens, no terminal state is left behind
        tracker.log(step, {"train/loss": 2.3, ...})    # after `step` updates; metrics.jsonl first, then the rest
        tracker.print("a line above the progress bar")
        tracker.finish({"status": "completed", ...})   # writes summary.json as given, draws, says where to look

Log before saving the checkpoint of the same step: a resumed run keeps the lines up to its checkpoint's step and writes
later ones again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from data.atomic import write_atomically
from data.untrusted import read_text
from recipe.run.jobs import read_manifest
from recipe.run.metrics import MetricsFile, read_metrics
from recipe.run.progress import ProgressLine
from recipe.run.run_folder import read_summary
from recipe.run.summary import ENVIRONMENT, draw_loss_curve, write_summary
from recipe.run.wandb_thread import WandbThread

# The longest wait for W&B at the end of a run, when an upload takes longer than writing a file.
SECONDS_TO_FINISH = {"online": 60.0, "offline": 30.0}
LONGEST_NAME, LONGEST_TAG = 128, 64  # characters that W&B takes
SECONDS_TO_LEAVE = 10.0  # where the run breaks off without `finish`


class TrackingMode(Enum):
    """The tracker of the run, in addition to metrics.jsonl."""

    online = "online"  # on W&B's server
    offline = "offline"  # by W&B in the run folder; `wandb sync` uploads it
    disabled = "disabled"  # nowhere


@dataclass
class TrackingConfig:
    """The options under `tracking.*`.

    mode     where metrics go besides the run folder
    project  in W&B
    group    in W&B, which the runs of a sweep share
    """

    mode: TrackingMode = TrackingMode.offline
    project: str = "gpt-attention"
    group: str | None = None


class Tracker:
    """Records one run; see the module's docstring."""

    def __init__(
        self,
        run_folder: Path,
        config: TrackingConfig,
        *,
        recorded: Mapping[str, Any],
        steps: int,
        resume_step: int | None = None,
    ) -> None:
        """
        recorded     in W&B as the run's configuration: that, and versions, device and git commit
        steps        updates of the whole run
        resume_step  the step from which it resumes; None for a new run

        Raises TrackingError where the run folder belongs to another run.
        """
        self.run_folder, self.config = run_folder, config
        self.name = name_of(run_folder)
        run_folder.mkdir(parents=True, exist_ok=True)
        self.metrics = MetricsFile(run_folder / "metrics.jsonl", resume_step)
        (run_folder / "summary.json").unlink(missing_ok=True)  # describes a run that has ended
        self.progress = ProgressLine(steps, resume_step or 0)
        if self.metrics.warning is not None:
            self.print(f"warning: {self.metrics.warning}")
        self.wandb: WandbThread | None = None
        if config.mode is not TrackingMode.disabled:
            self.wandb = start_wandb(run_folder, config, recorded)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record `metrics` after `step` updates: numbers, or words where the name says so.

        Raises OSError if metrics.jsonl cannot be written, and nothing else.
        """
        self.metrics.append(step, metrics)
        self.progress.update(step, metrics)
        if self.wandb is not None:
            self.wandb.log(step, metrics)
            self._warn(self.wandb)

    def print(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        self.progress.print(text)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, draw loss.png, close W&B, and print where they are.

        Raises OSError where the run folder cannot be written.
        """
        self.metrics.close()
        self.progress.close()
        write_summary(self.run_folder / "summary.json", summary)
        draw_loss_curve(read_metrics(self.metrics.path), self.run_folder / "loss.png", self.name)
        if self.wandb is not None:
            self.wandb.end(True, SECONDS_TO_FINISH[self.config.mode.value])
            self._warn(self.wandb)
        lines = {"run folder": self.run_folder, "metrics": "metrics.jsonl, summary.json", "loss curve": "loss.png"}
        if self.wandb is not None and self.wandb.location is not None:
            lines["W&B"] = self.wandb.location
        for label, value in lines.items():
            self.print(f"{label:<12}{value}")

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.close()
        self.metrics.close()
        if self.wandb is not None:
            self.wandb.end(False, SECONDS_TO_LEAVE)
            self._warn(self.wandb)

    def _warn(self, wandb: WandbThread) -> None:
        for warning in wandb.warnings():
            self.print(f"warning: {warning}")


def start_wandb(run_folder: Path, config: TrackingConfig, recorded: Mapping[str, Any]) -> WandbThread:
    """The W&B run of a run folder, which has the same id after a resume. Its tags are the names of its parts."""
    path = run_folder / "wandb" / "run-id"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, secrets.token_hex(4))
    parts = [recorded[part]["name"] for part in ("attention", "score", "model", "data") if part in recorded]
    return WandbThread(
        run_folder,
        {
            "mode": config.mode.value,
            "project": config.project,
            "group": config.group,
            "name": name_of(run_folder),
            "tags": [str(part)[:LONGEST_TAG] for part in dict.fromkeys(parts)],
            "id": read_text(path),
            "resume": "allow" if config.mode is TrackingMode.online else None,
            "config": recorded,
        },
        partial(add_files, run_folder),
    )


def add_files(run_folder: Path, run: Any, step: int) -> None:
    """Add the summary, without what the W&B run's configuration has, and the loss curve."""
    import wandb  # takes a second

    known = ("config", *ENVIRONMENT)
    run.summary.update({"summary": {k: v for k, v in read_summary(run_folder).items() if k not in known}})
    run.log({"figures/loss": wandb.Image(str(run_folder / "loss.png"))}, step=step)


def send_again(run_folder: Path, config: TrackingConfig) -> list[str]:
    """Send the entries that summary.json has gained since the run ended to W&B. Returns warnings, a sentence each."""
    if config.mode is TrackingMode.disabled:
        return []
    summary = read_summary(run_folder)
    environment = {name: summary[name] for name in ENVIRONMENT if name in summary}
    again = start_wandb(run_folder, config, summary.get("config", {}) | environment)
    again.end(True, SECONDS_TO_FINISH[config.mode.value])
    return again.warnings()


def name_of(run_folder: Path) -> str:
    """<date>/<time>-<attention>; of a job of a sweep its number and what distinguishes it: "3 tiled seq_len=128"."""
    folder = run_folder.absolute()
    names = read_manifest(folder.parent).get("names")
    name = names.get(folder.name) if isinstance(names, dict) else None
    return f"{folder.name} {name}"[:LONGEST_NAME] if name else "/".join(folder.parts[-2:])
