"""What training leaves in a run folder and the report reads: metrics.jsonl, and how far `parity/*` may go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# What a right implementation's `parity/*` may be, in units of `parity/noise_*`. Summing in another order, it is mostly
# within twice; where queries' and keys' gradients nearly cancel, FlashAttention's delta = rowsum(do * out) costs up to
# eight times in fp32 and four in bf16. Wrong ones are off by tens to millions of times after a few updates.
PARITY_MARGIN = 10.0


def read_metrics(path: Path, damaged: list[int] | None = None) -> list[dict[str, Any]]:
    """The records in `path` by rising step, each step once; none where there is no file.

    damaged  takes the numbers of the lines that are not whole, counted from 1; they are left out: the last one of a
             process that was killed

    Of a step that was logged more than once, the later values count.
    """
    records: dict[int, dict[str, Any]] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    for n, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records.setdefault(int(record["step"]), {}).update(record)
        except (ValueError, TypeError, KeyError):
            if damaged is not None and line.strip():
                damaged.append(n)
    return [records[step] for step in sorted(records)]
