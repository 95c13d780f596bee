"""Block sizes, warps and pipeline stages: tables, so that nobody waits for an autotuner.

The Hopper table is what bench/tune.py measured on an H200, head sizes above 128 excepted. The others were chosen to fit
the shared memory of the smallest GPU they serve, with the fewest spilled registers the compiler reports; they were not
timed. Dropout needs query tiles that are multiples of 16 and key tiles that are multiples of 64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

FP8_HAS_NO_GRADIENTS = (
    "attention.precision=fp8 is for evaluation and inference, and has no gradients; train with "
    "attention.precision=inputs."
)


class Options(NamedTuple):
    """The arguments of a call that are not tensors: the plain fields of Score and Layout, and these.

    Dropout drops `threshold` of the 256 byte values. q_start and k_start are None where the last query stands at the
    last key. `path` and `precision` are AttentionConfig's.
    """

    causal: bool
    scale: float
    threshold: int
    tf32: bool
    window: int | None = None
    soft_cap: float | None = None
    q_start: int | None = None
    k_start: int | None = None
    path: str = "auto"
    precision: str = "inputs"


class Extras(NamedTuple):
    """The tensors of a call besides q, k and v.

    key           (7,) int64, as DropoutKey.pack gives it, where dropout drops
    slopes        (H,) fp32, of ALiBi
    sinks         (H,) fp32
    starts, ends  (B, L) int32, contiguous: document_starts and document_ends of Layout
    horizons      (B, H) int32, of ALiBi: keys at that distance or further away have no weight; None: not known
    """

    key: Any = None
    slopes: Any = None
    sinks: Any = None
    starts: Any = None
    ends: Any = None
    horizons: Any = None


class Mode(NamedTuple):
    """The constants a kernel is compiled for, besides its blocks.

    bounded   whether the keys that a query sees may begin after the first: with a window or documents
    horizon   whether tiles beyond ALiBi's horizon are skipped
    offsets   whether the last query stands elsewhere than at the last key
    fixed_max whether a row's maximum over one tile is used for all, as a soft cap keeps exp(s) from overflowing
    exact     whether scores are of fp32, and are changed without approximation
    precision of the products of fp32 numbers, "ieee" or "tf32"
    columns   of a tile: the head size, rounded up

    Kernels assign the fields that they pass on to local names: to Triton 3.6 a member is not a constant.
    """

    causal: bool
    window: int | None
    documents: bool
    bounded: bool
    horizon: bool
    offsets: bool
    soft_cap: float | None
    alibi: bool
    sinks: bool
    threshold: int
    fixed_max: bool
    exact: bool
    precision: str
    columns: int


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
DOCUMENT_LENGTH = 2048  # keys of a document that blocks are chosen for: the host does not know its lengths
HORIZONS_FROM = 2048  # queries, and keys that they see: with fewer, ALiBi's horizons save less time than they take


def kind_of_scores(options: Options, extras: Extras) -> str:
    """The table of HOPPER_SCORES that a call's scores ask for, or "plain"."""
    if options.soft_cap is not None:
        return "soft_cap"
    if options.window is not None or extras.starts is not None:
        return "bounded"
    return "plain" if extras.slopes is None else "alibi"


def seen_length(length: int, options: Options, extras: Extras) -> int:
    """Number of a row's keys that a query sees, or may see."""
    if options.window is not None or extras.starts is not None:
        length = min(length, options.window or DOCUMENT_LENGTH)
    return length


def has_horizons(T: int, S: int, options: Options, extras: Extras) -> bool:
    """Whether a call of T queries and S keys has horizons. With other positions a query's own key may be missing."""
    length = min(T, seen_length(S, options, extras))
    return extras.slopes is not None and options.q_start is None and length >= HORIZONS_FROM


def choose(
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    options: Options,
    extras: Extras,
) -> KernelConfigs:
    """The blocks for a head size, a number of keys, a dtype, a compute capability and what a call asks for."""
    dropout = options.threshold > 0
    length = seen_length(length, options, extras)
    if dtype == torch.float32:
        tables, dropout = [FP32], True  # the same with and without
    elif capability[0] in (9, 10):
        tables = [HOPPER_SCORES.get(kind_of_scores(options, extras), {}), HOPPER]
    else:
        tables = [OLDER]
    fitting = [
        [key for key in table if head_dim <= key.head_dim and length <= key.length and key.dropout == dropout]
        for table in tables
    ]
    table, keys = next((table, keys) for table, keys in zip(tables, fitting, strict=True) if keys)
    return table[min(keys)]
