"""metrics.jsonl: a line of strict JSON for each logged step, whatever else fails.

    {"step": 10, "train/loss": 4.1, "optim/lr": 0.0001, ...}

A loss that is not finite is written as "nan", "inf" or "-inf", which `float` reads. A line reaches the operating system
before `append` returns, so a killed process loses none.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.atomic import write_atomically
from data.untrusted import METRICS, parse_json, read_bytes
from recipe.errors import UserError
from recipe.files import to_json

DAMAGED = "metrics.damaged.jsonl"  # the lines that could not be read when the run was resumed


class TrackingError(UserError, RuntimeError):
    """A run folder that holds the metrics of another run; the message says what to do."""


def read_metrics(path: Path, damaged: dict[int, bytes] | None = None) -> list[dict[str, Any]]:
    """The records in `path` in order of steps, each step once; none if there is no file.

    damaged  receives the lines that cannot be read, by number from 1 on, such as the last one of a killed process. They
             are skipped

    Of a step that was logged more than once, the later values count. Raises OSError, UntrustedError.
    """
    records: dict[int, dict[str, Any]] = {}
    try:
        lines = read_bytes(path, METRICS).split(b"\n")
    except FileNotFoundError:
        return []
    for n, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
            step = int(record["step"])
            records.setdefault(step, {}).update(record, step=step)
        except (ValueError, TypeError, KeyError, OverflowError):
            if damaged is not None and line.strip():
                damaged[n] = line
    return [records[step] for step in sorted(records)]


class MetricsFile:
    """The metrics of one run, written a line at a time.

    warning  a sentence on lines of an earlier part of the run that cannot be read
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Begin a new file or, with `resume_step`, keep the readable lines of the old one up to that step.

        Lines that cannot be read go to metrics.damaged.jsonl. Raises TrackingError if the file belongs to another run.
        """
        self.path, self.last_step = path, -1
        self.warning: str | None = None
        if resume_step is not None:
            damaged: dict[int, bytes] = {}
            records = [record for record in read_metrics(path, damaged) if record["step"] <= resume_step]
            damaged.pop(path.read_bytes().count(b"\n") + 1, None)  # half a last line, whose step is logged again
            if damaged:
                with path.with_name(DAMAGED).open("ab") as aside:
                    aside.writelines(line + b"\n" for line in damaged.values())
                self.warning = (
                    f"these lines of {path} cannot be read, and are in {DAMAGED} now: {', '.join(map(str, damaged))}."
                )
            write_atomically(path, "".join(to_json(record) + "\n" for record in records))
            if records:
                self.last_step = records[-1]["step"]
        elif path.exists() and path.stat().st_size:
            raise TrackingError(
                f"{path} holds the metrics of another run; continue that one with resume={path.parent}, "
                "or choose another hydra.run.dir."
            )
        self.file = path.open("ab", buffering=0)

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log `metrics` after `step` updates. A second line of the same step adds to the first.

        Raises OSError where it cannot be written, ValueError for a step before the last one.
        """
        if step < self.last_step:
            raise ValueError(f"step {step} is logged after step {self.last_step}")
        line = (to_json({"step": step, **metrics}) + "\n").encode()
        if self.file.write(line) != len(line):  # the disk had room for part of the line only
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.last_step = step

    def close(self) -> None:
        """Sync the file to the disk and close it; safe to call twice."""
        if not self.file.closed:
            os.fsync(self.file.fileno())
            self.file.close()
