"""train.py for the referee: a run ends where code that an edit may change reads the validation text.

    python -m recipe.compare.watched '["model"]' '["tokens/*/val.*"]' <overrides of train.py>

The first list has the paths that an edit may change, the second the patterns of the files. It sees what Python opens,
also in threads. It is no sandbox: code that reads a file by other means is not noticed.
"""

import json
import os
import runpy
import sys
from fnmatch import fnmatch
from types import FrameType
from typing import Any

READS = 3  # the status of a run that read the validation text


def watch(editable: list[str], patterns: list[str]) -> None:
    """From here on, end the process where a file of one of the `patterns` is opened by, or on behalf of, an `editable`
    file or folder."""
    places = tuple(os.path.abspath(path) for path in editable)

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and any(fnmatch(path, pattern) for pattern in patterns):
            if (file := frame.f_code.co_filename).startswith(places):
                os.write(2, f"error: {os.path.relpath(file)} reads the validation text {path}\n".encode())
                os._exit(READS)
            frame = frame.f_back

    sys.addaudithook(opened)


if __name__ == "__main__":
    watch(*map(json.loads, sys.argv[1:3]))
    sys.argv = ["train.py", *sys.argv[3:]]
    runpy.run_path(os.path.abspath("train.py"), run_name="__main__")
