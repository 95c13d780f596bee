"""Atomic writes: after an interruption a file holds either its old or its new content."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: str) -> None:
    """Replace `path` with `content` in one step. Raises OSError with the old content untouched."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def plain(value: Any) -> Any:
    """`value` in JSON's types, with non-finite numbers as "nan", "inf" and "-inf", which `float` reads back.

    JSON has no such numbers, and null would make an overflowed loss look like one that was not measured.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    return str(value)


def to_json(value: Any, **options: Any) -> str:
    """Strictly valid JSON of `plain(value)`."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, **options)
