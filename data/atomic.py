"""Atomic writes: after an interruption a file holds either its old or its new content."""

import os
from pathlib import Path
from typing import IO, Any


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_disk(file: IO[Any]) -> None:
    """Return when the content of an open file has reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` with `content` in one step. Raises OSError with the old content untouched."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            to_disk(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
