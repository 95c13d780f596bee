"""Files of JSON lines."""

import json
from collections.abc import Iterable
from pathlib import Path


def write_lines(path: Path, lines: Iterable[object]) -> Path:
    """Write a file whose lines are these."""
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path
