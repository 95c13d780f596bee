"""Runs of train.py, each in a separate process, as rows of a result file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from bench.record import Row

OUTPUT_LINES = 40  # of a run that failed, which become its message


def python(arguments: Sequence[str], gpus: int = 1) -> str:
    """Run Python in this checkout, under torchrun for several GPUs, and show its output as it comes.

    Returns its last lines where it failed, else nothing.
    """
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    command = [sys.executable, "-u", *ranks, *arguments]
    tail: deque[str] = deque(maxlen=OUTPUT_LINES)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"    {line}", end="", flush=True)
            tail.append(line)
    return "".join(tail) if process.returncode else ""


def train(overrides: Sequence[str], folder: Path, gpus: int = 1) -> Row:
    """Run train.py in a run folder. Returns its recorded results, or {"status": "failed", "message": ...}."""
    output = python(["train.py", *overrides, f"hydra.run.dir={folder}"], gpus)
    if not (folder / "summary.json").exists():
        return {"status": "failed", "message": output.strip()[-2000:]}
    return recorded(folder)


def recorded(folder: Path) -> Row:
    """The results in a run folder's summary.json.

    A run whose model did not fit into memory lacks most of them.
    """
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    row: Row = {"status": summary["status"], "message": summary.get("message"), "wall_s": summary.get("wall_time_s")}
    row |= {name.split("/")[1]: value for kind in ("median", "peak") for name, value in summary.get(kind, {}).items()}
    return {name: value for name, value in row.items() if value is not None}
