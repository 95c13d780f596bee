"""Block sizes, warps and pipeline stages: a table, so that nobody waits for an autotuner.

The Hopper entries are what bench/tune.py measured on an H200; the others are chosen to fit the shared memory of the
smallest GPU they serve and to spill no registers there, and were not tuned. Blocks are (queries, keys, warps, stages).
Dropout needs query tiles that are multiples of 16 and key tiles that are multiples of 64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Rows of a query tile, rows of a key tile, warps of a program, and tiles in flight."""

    q: int
    k: int
    warps: int
    stages: int


class Passes(NamedTuple):
    """The blocks of the three kernels."""

    forward: Blocks
    dq: Blocks
    dkdv: Blocks


# (architecture, head size up to, dropout) -> blocks, for 16-bit inputs.
TABLE: dict[tuple[str, int, bool], Passes] = {
    ("hopper", 64, False): Passes(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    ("hopper", 64, True): Passes(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    ("hopper", 128, False): Passes(Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    ("hopper", 128, True): Passes(Blocks(128, 128, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 128, 8, 2)),
    ("hopper", 256, False): Passes(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 1)),
    ("hopper", 256, True): Passes(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 1)),
}
# Products in fp32 without tensor cores unroll into one instruction for each multiplication: tiles stay small.
FP32 = Passes(Blocks(32, 64, 4, 1), Blocks(32, 64, 4, 1), Blocks(16, 64, 4, 1))


def choose(head_dim: int, dtype: torch.dtype, dropout: bool, capability: tuple[int, int]) -> Passes:
    """The table's entry for a head size, an input dtype, dropout on or off, and a GPU's compute capability."""
    if dtype == torch.float32:
        return FP32
    size = next(size for size in (64, 128, 256) if head_dim <= size)
    return TABLE["hopper", size, dropout]
