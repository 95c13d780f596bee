"""The programs as a user calls them, within this process or in another: how they end and what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import train as train_module
from recipe.infer.huggingface import HuggingFace
from recipe.run.launch import launch
from recipe.run.metrics import read_metrics

ROOT = Path(__file__).parents[1]


def started(*arguments: str | Path, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of Python with these arguments and further variables, in a folder, once it has ended."""
    command, environment = [sys.executable, *arguments], os.environ | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def completed(*arguments: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """What such a process prints that ends well."""
    done = started(*arguments, folder=folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(*arguments: str) -> int:
    """The exit status of `python train.py <arguments>`."""
    with mock.patch.object(sys, "argv", ["train.py", *arguments]):
        try:
            launch(train_module.main, HuggingFace())
        except SystemExit as end:
            return int(end.code or 0)
    return 0


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    paths = (path for path in folder.rglob("*") if not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def summary(run: Path) -> dict[str, Any]:
    """What a run's summary.json has."""
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def losses(run: Path) -> list[tuple[int, Any, Any]]:
    """The step, the training loss and the validation loss of each line of a run's metrics.jsonl."""
    lines = read_metrics(run / "metrics.jsonl")
    return [(line["step"], line.get("train/loss"), line.get("val/loss")) for line in lines]


def rewrite(path: Path, old: str, new: str) -> None:
    """Write other words into a file of text."""
    path.write_text(path.read_text().replace(old, new))
