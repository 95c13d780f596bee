"""The results of an evaluation: printed, and added to the run's summary.json and its W&B run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.untrusted import UntrustedError
from recipe.infer.trained import Loaded
from recipe.run.run_folder import SUMMARY, StillRunning, locked, read_summary
from recipe.run.summary import write_summary
from recipe.run.tracker import send_again

Results = dict[str, dict[str, Any]]


def show(name: str, metrics: Mapping[str, Any]) -> None:
    """Print a result on one line."""
    print(name, *(f"{metric} {formatted(value)}" for metric, value in metrics.items()), sep="  ", flush=True)


def formatted(value: float) -> str:
    """A count whole, a measurement to six digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def record(run: Path, trained: Loaded, results: Results) -> None:
    """Add the results to summary.json and to the run in W&B, if the run is over."""
    path = run / SUMMARY
    try:
        with locked(run):
            try:
                summary = read_summary(run)
            except FileNotFoundError:
                print(f"{path} does not exist yet: the results are only printed.", file=sys.stderr)
                return
            except UntrustedError as error:
                print(f"{path} {error}: the results are only printed.", file=sys.stderr)
                return
            earlier = summary.get("eval")
            summary["eval"] = (earlier if isinstance(earlier, dict) else {}) | results
            write_summary(path, summary)
            for warning in send_again(run, trained.config.tracking):
                print(f"warning: {warning}", file=sys.stderr)
    except StillRunning:
        print(f"{run} is still running: the results are only printed.", file=sys.stderr)
