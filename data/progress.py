"""How far a long job is: a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(label: str, total: int | None, done: int = 0) -> Iterator[Callable[..., None]]:
    """Yields a function that takes the number of items done since its last call, and optionally what to say of all.

    total  items, None if unknown
    done   items that an interrupted job had done
    """
    before, started = done, time.monotonic()
    printed = started

    def advance(count: int, said: str = "") -> None:
        nonlocal done, printed
        done, now = done + count, time.monotonic()
        if not count or now - printed < SECONDS_BETWEEN_LINES:
            return
        printed, said = now, said or f"{done:,} of {total:,}"
        if total is not None:
            seconds = (now - started) * max(total - done, 0) / (done - before)
            said += f", {timedelta(seconds=round(seconds))} left"
        print(f"{label}: {said}", file=sys.stderr, flush=True)

    yield advance
