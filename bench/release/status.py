"""The state of each part of a release: whether it has a result, and whether the result is newer than the kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from bench.record import Row
from bench.release.parts import PARTS, Part

UP_TO_DATE = "up to date"


class Status(NamedTuple):
    """The state of a part in words, and the measurement it refers to, if there is one."""

    state: str
    measurement: Row | None = None

    @property
    def minutes(self) -> float | None:
        """How long that measurement took; None where its end was not recorded."""
        head = self.measurement or {}
        if not head.get("ended") or head["ended"] == head["date"]:
            return None
        began, ended = (datetime.fromisoformat(head[name]) for name in ("date", "ended"))
        return (ended - began).total_seconds() / 60


def status(part: Part, path: Path, digests: Mapping[str, str]) -> Status:
    """The state of a part.

    path     its result file
    digests  group -> digest of the kernels as they are now
    """
    heads = json.loads(path.read_text())["measurements"] if path.exists() else []
    mine = [head for head in heads if repeats(head["command"], part.command)]
    if not heads:
        return Status("missing")
    if not mine:
        return Status("measured by another command", max(heads, key=lambda head: head["date"]))
    newest = max(mine, key=lambda head: head["date"])
    return Status(state_of(newest, part, digests), newest)


def state_of(head: Row, part: Part, digests: Mapping[str, str]) -> str:
    """The state of a part with this measurement."""
    if head["ended"] is None:
        return "interrupted"
    if head["dirty"]:
        return "measured with uncommitted changes"
    if not all(group in head["kernels"] for group in part.kernels):
        return "kernels were not recorded"
    changed = [group for group in part.kernels if head["kernels"][group] != digests[group]]
    return f"older than the kernels: {', '.join(changed)}" if changed else UP_TO_DATE


def repeats(recorded: str, command: str) -> bool:
    """Whether a recorded command is a part's command, also with further overrides such as a local text."""
    words = recorded.removeprefix("python -m ")
    return words == command or (words.startswith(f"{command} -- ") and words not in [part.command for part in PARTS])
