"""The progress of preparing tokens: a bar in a terminal, a line every few seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0


class PreparationProgress:
    """Tokens so far, and their share of the whole if its size is known."""

    def __init__(
        self,
        name: str,
        total: int | None,
        console: Console,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        name   of the corpus
        total  the final value of `done`; None if unknown
        done   where an interrupted preparation continues
        """
        self.name, self.total, self.console, self.clock = name, total, console, clock
        self.printed = clock()
        columns = (SpinnerColumn(), TextColumn(f"data={name}"), BarColumn(), TextColumn("{task.description}"))
        self.bar = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self.task = self.bar.add_task("", total=total, completed=done)

    def __enter__(self) -> PreparationProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def update(self, done: int, tokens: int) -> None:
        """`done` of `total` is finished, and `tokens` are written."""
        text = f"{tokens / 1e6:.1f}M tokens"
        self.bar.update(self.task, completed=done, description=text)
        if not self.console.is_terminal and self.clock() - self.printed >= SECONDS_BETWEEN_LINES:
            self.printed = self.clock()
            share = f", {min(done / self.total, 1):.0%} done" if self.total else ""
            self.console.print(f"preparing data={self.name}: {text}{share}")
