"""Run a function of this package and record what every one of its lines did.

The interpreter calls back before each line (sys.settrace), so what is recorded is what ran: the names a line assigned
and their numbers, what it moved between slow and fast memory, and what lay in either afterwards.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from learn.memory import Rows, Slow


@dataclass(frozen=True)
class Move:
    """Rows of a tensor in slow memory that a line loaded or stored."""

    name: str
    rows: Rows
    kind: str  # load or store


@dataclass(frozen=True)
class Step:
    """A line that ran, and the state after it.

    line     its place in the function's source, from 0
    fast     the tensors in fast memory by name
    slow     those in slow memory
    tile     the tiles that the loops are at: {"i": rows of queries, "j": rows of keys}, as far as they have begun
    read     numbers read from slow memory so far, and `written` to it
    """

    line: int
    fast: dict[str, Tensor]
    slow: dict[str, Tensor]
    tile: dict[str, Rows]
    moves: tuple[Move, ...]
    read: int
    written: int


@dataclass
class Recording:
    """A function's source and everything that it did."""

    source: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def most_in_fast_memory(self) -> int:
        """The most numbers that the function's names held at once."""
        return max(sum(tensor.numel() for tensor in step.fast.values()) for step in self.steps)


def record(function: Callable[..., None], slow: dict[str, Slow], rest: dict[str, Any]) -> Recording:
    """function(**slow, **rest), recorded."""
    lines, first_line = inspect.getsourcelines(function)
    recording = Recording([line.rstrip("\n") for line in lines])
    moves: list[Move] = []
    names = {id(tensor): name for name, tensor in slow.items()}
    for tensor in slow.values():
        tensor.on_move = lambda moved, rows, kind: moves.append(Move(names[id(moved)], rows, kind))
    traffic = next(iter(slow.values())).traffic
    running: int | None = None  # the line that runs now

    def finish(frame: FrameType) -> None:
        if running is None:
            return
        names_now = frame.f_locals
        step = Step(
            line=running - first_line,
            fast={name: value.clone() for name, value in names_now.items() if isinstance(value, Tensor)},
            slow={name: tensor.tensor.clone() for name, tensor in slow.items()},
            tile={name: names_now[name] for name in ("i", "j") if isinstance(names_now.get(name), slice)},
            moves=tuple(moves),
            read=traffic.read,
            written=traffic.written,
        )
        recording.steps.append(step)
        moves.clear()

    def on_event(frame: FrameType, event: str, _: object) -> Any:
        nonlocal running
        if event in ("line", "return"):
            finish(frame)
            running = frame.f_lineno
        return on_event

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_event if frame.f_code is function.__code__ else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        function(**slow, **rest)
    finally:
        sys.settrace(before)
        for tensor in slow.values():
            tensor.on_move = None
    return recording
