"""Run a function of this package and record every line that it executes.

The interpreter calls back before each line (sys.settrace). Recorded are the names that a line assigned and their
values, the rows that it moved between slow and fast memory, and the content of both afterwards.
"""

import ast
import inspect
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
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
    idle     the names of fast tensors that no later line reads before assigning them again
    slow     the tensors in slow memory
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


@dataclass(frozen=True)
class Source:
    """A function's lines, counted from 0, and their names.

    first     the file's number of the first line
    loops     the name that a loop assigns, with the loop's first and last line
    assigned  the names that a line assigns
    read      the names that a line reads
    """

    lines: list[str]
    first: int
    loops: list[tuple[str, int, int]]
    assigned: dict[int, set[str]]
    read: dict[int, set[str]]


@cache
def source_of(function: Callable[..., None]) -> Source:
    """The source of a function; parsed once, as each is recorded many times."""
    lines, first = inspect.getsourcelines(function)
    source = Source([line.rstrip("\n") for line in lines], first, [], defaultdict(set), defaultdict(set))
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            source.loops.append((node.target.id, node.lineno - 1, (node.end_lineno or node.lineno) - 1))
        elif isinstance(node, ast.Name):
            names = source.assigned if isinstance(node.ctx, ast.Store) else source.read
            names[node.lineno - 1].add(node.id)
    return source


def record(function: Callable[..., None], slow: dict[str, Slow], arguments: dict[str, Any]) -> Recording:
    """Call function(**arguments) and record each line; `slow` are the tensors in slow memory that it uses, by name."""
    source = source_of(function)
    recording = Recording(source.lines)
    moves: list[Move] = []
    names = {id(tensor): name for name, tensor in slow.items()}
    for tensor in slow.values():
        tensor.on_move = lambda moved, rows, kind: moves.append(Move(names[id(moved)], rows, kind))
    traffic = next(iter(slow.values())).traffic
    running: int | None = None  # the line that runs now

    def finish(frame: FrameType, following: int) -> None:
        if running is None:
            return
        names_now, line = frame.f_locals, running - source.first
        # The line of a `for` runs once more when the loop has ended.
        lines = (line, following - source.first)
        around = [name for name, start, end in source.loops if start <= min(lines) and max(lines) <= end]
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
            finish(frame, frame.f_lineno if event == "line" else source.first)
            running = frame.f_lineno
        return on_event

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_event if frame.f_code is function.__code__ else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        function(**arguments)
    finally:
        sys.settrace(before)
        for tensor in slow.values():
            tensor.on_move = None
    recording.steps = with_idle(recording.steps, source)
    return recording


def with_idle(recorded: list[Step], source: Source) -> list[Step]:
    """The steps with their idle tensors, computed from the last step back, by the names that later lines read."""
    steps: list[Step] = []
    needed: set[str] = set()
    for step in reversed(recorded):
        steps.append(replace(step, idle=frozenset(step.fast.keys() - needed)))
        needed = (needed - source.assigned[step.line]) | source.read[step.line]
    return steps[::-1]
