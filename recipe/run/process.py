"""How the programs begin and end: they import without garbage collection, and end without Python's teardown.

The collector visits all imported objects again and again, which takes a fifth of the start of train.py. The teardown
frees them one by one, which takes a second at the end. mypy ends in this way too (`mypy.util.hard_exit`).
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from recipe.errors import refuse_windows_lines

_status: list[int] = []


def begin() -> None:
    """Call this before any large import: functions that are registered with atexit later then run before the exit.

    Until `run`, Ctrl-C ends the process with a sentence and status 130.
    """
    gc.disable()
    atexit.register(_end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupted)


def run(program: Callable[[], None]) -> None:
    """Run a program, whose status its SystemExit gives, or is 1 after another exception."""
    gc.freeze()  # else every later run of the collector visits all imported objects
    gc.enable()
    atexit.register(gc.unfreeze)  # Triton 3.9 complains in the teardown about objects that were never collected
    if signal.getsignal(signal.SIGINT) is _interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        refuse_windows_lines()
        program()
    except SystemExit as end:
        _status.append(1 if isinstance(end.code, str) else int(end.code or 0))
        raise
    except Exception:
        _status.append(1)
        raise
    _status.append(0)


def leave_at_once() -> None:
    """From here on, end the program without the functions that were registered with atexit before."""
    atexit.register(_end)


def _interrupted(number: int, frame: FrameType | None) -> None:
    print("\ninterrupted: nothing was started", file=sys.stderr, flush=True)
    os._exit(128 + number)


def _end() -> None:
    """The last of the functions registered with atexit."""
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[-1])
