"""How the programs begin and end: they import without garbage collection, and end without Python's teardown.

Collecting visits all that is imported again and again, a fifth of the start of train.py; the teardown frees it all,
a second at the end. mypy ends in this way too (`mypy.util.hard_exit`).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable

_status: list[int] = []


def begin() -> None:
    """Call this before anything large is imported: what is registered with atexit later runs before the end."""
    gc.disable()
    atexit.register(_end)


def run(program: Callable[[], None]) -> None:
    """Run a program, whose status its SystemExit gives. Any other exception ends the process as usual."""
    gc.freeze()  # else every later run of the collector visits all that has been imported
    gc.enable()
    atexit.register(gc.unfreeze)  # where the teardown comes, Triton 3.9 complains of what is never collected
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _status.append(end.code or 0)
        raise
    _status.append(0)


def _end() -> None:
    """The last of the functions registered with atexit."""
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[-1])
