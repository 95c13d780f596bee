"""Run a function of this package and record what every one of its lines did.

The interpreter calls back before each line (sys.settrace), so what is recorded is what ran: the names a line assigned
and their numbers, what it moved between slow and fast memory, and what lay in either afterwards.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    idle     those of them that no later line reads before their names are given to others
    slow     those in slow memory
    tile     the tiles that the loops around the line are at: {"i": rows of queries, "j": rows of keys}
    read     numbers read from slow memory so far, and `written` to it
    """

    line: int
    fast: dict[str, Tensor]
    slow: dict[str, Tensor]
    tile: dict[str, Rows]
    moves: tuple[Move, ...]
    read: int
    written: int
    idle: frozenset[str] = frozenset()


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
    nodes = list(ast.walk(ast.parse(textwrap.dedent("".join(lines)))))
    loops = [(n.target.id, n) for n in nodes if isinstance(n, ast.For) and isinstance(n.target, ast.Name)]
    moves: list[Move] = []
    names = {id(tensor): name for name, tensor in slow.items()}
    for tensor in slow.values():
        tensor.on_move = lambda moved, rows, kind: moves.append(Move(names[id(moved)], rows, kind))
    traffic = next(iter(slow.values())).traffic
    running: int | None = None  # the line that runs now

    def finish(frame: FrameType, following: int) -> None:
        if running is None:
            return
        names_now, line = frame.f_locals, running - first_line
        # A loop's own line runs once more when the loop has ended.
        here = {line + 1, following - first_line + 1}
        around = [name for name, loop in loops if loop.lineno <= min(here) and max(here) <= (loop.end_lineno or 0)]
        step = Step(
            line=line,
            fast={name: value.clone() for name, value in names_now.items() if isinstance(value, Tensor)},
            slow={name: tensor.tensor.clone() for name, tensor in slow.items()},
            tile={name: names_now[name] for name in around if name in names_now},
            moves=tuple(moves),
            read=traffic.read,
            written=traffic.written,
        )
        recording.steps.append(step)
        moves.clear()

    def on_event(frame: FrameType, event: str, _: object) -> Any:
        nonlocal running
        if event in ("line", "return"):
            finish(frame, frame.f_lineno if event == "line" else first_line)
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
    recording.steps = with_idle(recording.steps, [n for n in nodes if isinstance(n, ast.Name)])
    return recording


def with_idle(recorded: list[Step], names: list[ast.Name]) -> list[Step]:
    """The steps with what is idle: found from the last one back, by the names that later lines read."""
    steps: list[Step] = []
    needed: set[str] = set()
    for step in reversed(recorded):
        steps.append(replace(step, idle=frozenset(step.fast.keys() - needed)))
        on_line = [name for name in names if name.lineno - 1 == step.line]
        needed -= {name.id for name in on_line if isinstance(name.ctx, ast.Store)}
        needed |= {name.id for name in on_line if isinstance(name.ctx, ast.Load)}
    return steps[::-1]
