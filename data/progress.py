"""How far a long job is: a bar in a terminal, a line every few seconds in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0  # where there is no terminal


@contextmanager
def progress(label: str, total: int | None, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function that takes the number of items done since its last call, and optionally what to say of all.

    total  items, None if unknown
    done   items that an interrupted job had done
    """
    console = Console(file=sys.stderr, soft_wrap=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total, said="")
        before, started = done, time.monotonic()
        printed = started

        def advance(count: int, said: str = "") -> None:
            nonlocal done, printed
            done += count
            said, now = said or f"{done:,} of {total:,}", time.monotonic()
            bar.update(task, completed=done, said=said)
            if not console.is_terminal and count and now - printed >= SECONDS_BETWEEN_LINES:
                printed = now
                if total is not None:
                    seconds = (now - started) * max(total - done, 0) / (done - before)
                    said += f", {timedelta(seconds=round(seconds))} left"
                console.print(f"{label}: {said}")

        yield advance
