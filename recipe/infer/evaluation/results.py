"""The results of an evaluation: printed, and added to the run's summary.json and its W&B run."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from data.untrusted import UntrustedError
from recipe.infer.trained import Loaded
from recipe.run.run_folder import SUMMARY, StillRunning, locked, read_summary
from recipe.run.summary import write_summary
from recipe.run.tracker import send_again


class Measured(NamedTuple):
    """A measurement.

    name     for people, with the settings that change it
    metrics  by their names
    probe    that made it, with
    details  that its figure shows
    """

    name: str
    metrics: dict[str, Any]
    probe: str = ""
    details: Mapping[str, Any] = MappingProxyType({})


def show(one: Measured) -> None:
    """Print a measurement: its metrics on one line, a count whole, others to six digits."""
    shown = [f"{name} {x:,}" if isinstance(x, int) else f"{name} {x:.6g}" for name, x in one.metrics.items()]
    print(one.name, *shown, sep="  ", flush=True)


def record(run: Path, loaded: Loaded, every: Sequence[Measured]) -> None:
    """Add measurements to summary.json and to the run in W&B, if the run is over."""
    path, origin = run / SUMMARY, {"checkpoint": loaded.checkpoint.name}
    try:
        with locked(run):
            summary = read_summary(run)
            earlier = summary.get("eval")
            summary["eval"] = (earlier if isinstance(earlier, dict) else {}) | {
                one.name: {**one.metrics, **one.details, **origin} for one in every
            }
            write_summary(path, summary)
            for warning in send_again(run, loaded.config.tracking):
                print(f"warning: {warning}", file=sys.stderr)
        return
    except FileNotFoundError:
        reason = f"{path} does not exist yet"
    except UntrustedError as error:
        reason = f"{path} {error}"
    except StillRunning:
        reason = f"{run} is still running"
    print(f"{reason}: the results are only printed.", file=sys.stderr)
