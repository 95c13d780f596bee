"""The folder of checkpoints: each gets its name when it is complete, and a save removes the remains of a killed one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from data.atomic import sync

PARTIAL = ".partial-"  # being written or removed: not valid
REPLACED = ".replaced-"  # a complete checkpoint, moved aside while another of the same step replaces it


def partial_of(path: Path) -> Path:
    """The folder in which a checkpoint is written until it is complete."""
    return path.with_name(f"{PARTIAL}{path.name}")


def publish(partial: Path, path: Path) -> None:
    """Give the finished folder its name. Where the name is taken, the old checkpoint stays findable throughout."""
    aside = path.with_name(f"{REPLACED}{path.name}")
    if path.exists():
        path.rename(aside)
    partial.rename(path)
    sync(path.parent)
    remove(aside)


def clean(folder: Path) -> None:
    """Remove the remains of a killed save, and restore a checkpoint that it had moved aside."""
    for aside in folder.glob(f"{REPLACED}*"):
        original = aside.with_name(aside.name.removeprefix(REPLACED))
        if original.exists():
            remove(aside)
        else:
            aside.rename(original)
    for partial in folder.glob(f"{PARTIAL}*"):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a folder or file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, undamaged or not. One that was moved aside counts while nothing has taken its name."""
    by_step = {}
    for path in sorted(folder.glob("*step-*")):  # '.' sorts before 's', so the proper name wins
        if match := re.fullmatch(rf"(?:{re.escape(REPLACED)})?step-(\d+)", path.name):
            by_step[int(match[1])] = path
    return by_step
