"""Shared by training and the report: reading metrics.jsonl, and the limit for `parity/*`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The limit for `parity/*` of a correct implementation, in units of `parity/noise_*`. Another order of summation is
# mostly within twice. FlashAttention's delta = rowsum(do * out) costs up to eight times in fp32 and four in bf16, where
# the gradients of queries and keys nearly cancel. Wrong implementations are off by tens to millions after a few
# updates.
PARITY_MARGIN = 10.0


def read_metrics(path: Path, damaged: list[int] | None = None) -> list[dict[str, Any]]:
    """The records in `path` in order of steps, each step once; none if there is no file.

    damaged  receives the numbers of incomplete lines, counted from 1, such as the last line of a killed process. They
             are skipped

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
