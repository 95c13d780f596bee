"""Block sizes, warps and pipeline stages: tables, so that nobody waits for an autotuner.

bench/attention/tune.py measured the Hopper table on an H200, except for head sizes above 128. The others were chosen to
fit the shared memory of the smallest GPU they serve, with the fewest spilled registers the compiler reports; they were
not timed. Dropout needs query tiles that are multiples of 16 and key tiles that are multiples of 64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..spec import Spec
from .call import Problem


class Blocks(NamedTuple):
    """Rows of a query tile, rows of a key tile, warps of a program, tiles in flight, registers a thread at most."""

    q: int
    k: int
    warps: int
    stages: int
    registers: int | None = None


class KernelConfigs(NamedTuple):
    """The blocks of the three kernels."""

    forward: Blocks
    dq: Blocks
    dkdv: Blocks


class ConfigKey(NamedTuple):
    """The key of a table's entry: the largest head size and sequence length it is for, and whether with dropout."""

    head_dim: int
    dropout: bool
    length: float = math.inf


Table = dict[ConfigKey, KernelConfigs]

# Compute capability 9.0 and 10.x.
HOPPER: Table = {
    ConfigKey(64, False, 2048): KernelConfigs(Blocks(64, 64, 4, 2, 96), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    ConfigKey(64, False, 8192): KernelConfigs(Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    ConfigKey(64, False): KernelConfigs(Blocks(64, 128, 4, 2), Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2)),
    ConfigKey(64, True, 2048): KernelConfigs(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2, 168)),
    ConfigKey(64, True, 8192): KernelConfigs(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 64, 4, 2)),
    ConfigKey(64, True): KernelConfigs(Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 2)),
    ConfigKey(128, False, 512): KernelConfigs(Blocks(128, 64, 4, 2), Blocks(128, 32, 4, 3), Blocks(64, 64, 4, 2)),
    ConfigKey(128, False, 2048): KernelConfigs(Blocks(64, 64, 4, 3), Blocks(128, 32, 4, 3), Blocks(64, 64, 4, 2)),
    ConfigKey(128, False, 8192): KernelConfigs(Blocks(128, 64, 4, 2), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2)),
    ConfigKey(128, False): KernelConfigs(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2)),
    ConfigKey(128, True, 2048): KernelConfigs(Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    ConfigKey(128, True): KernelConfigs(Blocks(128, 128, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2)),
    ConfigKey(256, False): KernelConfigs(Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 1), Blocks(64, 64, 8, 1)),
    ConfigKey(256, True): KernelConfigs(Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 1), Blocks(32, 64, 8, 2)),
}
# The same GPUs where scores are changed or bounded, timed at 16k tokens; HOPPER's entry is used where a table has none.
HOPPER_SCORES: dict[str, Table] = {
    "bounded": {
        ConfigKey(64, False): KernelConfigs(Blocks(64, 64, 4, 2, 96), Blocks(64, 32, 4, 3), Blocks(64, 64, 4, 3, 168)),
        ConfigKey(128, False): KernelConfigs(Blocks(64, 64, 4, 3), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2)),
    },
    "alibi": {
        ConfigKey(64, False): KernelConfigs(
            Blocks(64, 128, 4, 2, 168), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3, 168)
        ),
        ConfigKey(64, True): KernelConfigs(Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3), Blocks(128, 64, 4, 2)),
    },
    "soft_cap": {
        ConfigKey(64, False): KernelConfigs(Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3)),
        ConfigKey(64, True): KernelConfigs(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2)),
        ConfigKey(128, False): KernelConfigs(Blocks(64, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2)),
    },
}
# Ampere, Ada and whatever else has 99 KiB of shared memory for a program.
OLDER: Table = {
    ConfigKey(64, False): KernelConfigs(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 2)),
    ConfigKey(64, True): KernelConfigs(Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 4, 2)),
    ConfigKey(128, False): KernelConfigs(Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 64, 8, 2)),
    ConfigKey(128, True): KernelConfigs(Blocks(64, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 64, 8, 2)),
    ConfigKey(256, False): KernelConfigs(Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 1), Blocks(16, 64, 8, 1)),
    ConfigKey(256, True): KernelConfigs(Blocks(64, 64, 8, 1), Blocks(32, 64, 8, 1), Blocks(16, 64, 8, 1)),
}
# fp32 without tensor cores: every multiplication is an instruction, so small tiles keep compilation to seconds.
FP32: Table = {
    ConfigKey(64, True): KernelConfigs(Blocks(32, 64, 4, 1), Blocks(16, 64, 4, 1), Blocks(16, 64, 4, 1)),
    ConfigKey(128, True): KernelConfigs(Blocks(32, 64, 8, 1), Blocks(16, 64, 8, 1), Blocks(16, 64, 8, 1)),
    ConfigKey(256, True): KernelConfigs(Blocks(16, 64, 8, 1), Blocks(16, 64, 8, 1), Blocks(16, 64, 8, 1)),
}
TABLES = {"hopper": HOPPER, "older": OLDER, "fp32": FP32, **HOPPER_SCORES}


def kind_of_scores(spec: Spec) -> str:
    """The table of HOPPER_SCORES that a call's scores ask for, or "plain"."""
    if spec.score.soft_cap is not None or spec.score.formula is not None:  # formulas were not timed
        return "soft_cap"
    if spec.bounded:
        return "bounded"
    return "alibi" if spec.score.alibi else "plain"


@lru_cache(maxsize=1024)
def choose(problem: Problem) -> KernelConfigs:
    """The blocks of the plain kernels for a call."""
    dropout, length = problem.dropout, problem.visible
    if problem.dtype == torch.float32:
        tables, dropout = [FP32], True  # the same with and without
    elif problem.capability[0] in (9, 10):
        tables = [HOPPER_SCORES.get(kind_of_scores(problem.spec), {}), HOPPER]
    else:
        tables = [OLDER]
    fitting = [
        [key for key in table if problem.head_dim <= key.head_dim and length <= key.length and key.dropout == dropout]
        for table in tables
    ]
    table, keys = next((table, keys) for table, keys in zip(tables, fitting, strict=True) if keys)
    return table[min(keys)]
