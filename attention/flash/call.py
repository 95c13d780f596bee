"""A call as the kernels' launch functions receive it: its properties, its blocks, and its scores.

Blocks come from tables, so that nobody waits for an autotuner. The Hopper table was measured on an H200, except for
head sizes above 128. The others were chosen to fit the shared memory of the smallest GPU they serve, with the fewest
spilled registers the compiler reports; they were not timed. Dropout needs query tiles that are multiples of 16 and key
tiles that are multiples of 64.

Scores are computed by the options that the kernels have code for, or by a formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gpu
from ..formula.graph import leaf
from ..formula.parse import parse
from ..gpu import constant_when_compiled
from ..score import Score
from ..scores import OPTIONS
from ..spec import Inputs, Spec

DOCUMENT_LENGTH = 2048  # keys of a document that blocks are chosen for: the host does not know its lengths
HORIZONS_FROM = 2048  # queries, and keys that they see: with fewer, horizons save less time than they take


class KernelCall(NamedTuple):
    """A call besides q, k and v. q_start and k_start are used where spec.offsets."""

    spec: Spec
    inputs: Inputs
    q_start: int = 0
    k_start: int = 0

    @classmethod
    def of(cls, inputs: Sequence[Tensor], text: str, q_start: int, k_start: int) -> KernelCall:
        """From the arguments of a custom operator."""
        spec = Spec.read(text)
        return cls(spec, Inputs.of(spec, inputs), q_start, k_start)

    def problem(self, q: Tensor, k: Tensor) -> Problem:
        """Its properties for queries q (B, H, T, D) and keys k (B, H_kv, S, D)."""
        return Problem(self.spec, q.shape[-1], q.dtype, q.shape[2], k.shape[2], gpu.capability(q.device))


class Problem(NamedTuple):
    """The properties of a call that decide its kernels and their blocks.

    queries, keys  of a sequence: T and S
    capability     of the GPU
    """

    spec: Spec
    head_dim: int
    dtype: torch.dtype
    queries: int
    keys: int
    capability: tuple[int, int]

    @property
    def dropout(self) -> bool:
        return self.spec.threshold > 0

    @property
    def length(self) -> int:
        """Queries or keys of a sequence, the fewer."""
        return min(self.queries, self.keys)

    @property
    def visible(self) -> int:
        """The number of keys that a query sees, or may see."""
        return min(self.keys, self.spec.score.window or DOCUMENT_LENGTH) if self.spec.bounded else self.keys

    @property
    def has_horizons(self) -> bool:
        """Whether horizons save time, where ALiBi or a formula has some.

        With other positions the key at a query's position may be missing, and horizons do not hold.
        """
        spec = self.spec
        return spec.score.causal and not spec.offsets and min(self.queries, self.visible) >= HORIZONS_FROM


class Mode(NamedTuple):
    """The constants a kernel is compiled for, besides its blocks.

    bounded   whether the keys that a query sees may begin after the first: with a window or documents
    horizon   whether tiles beyond a horizon are skipped, see horizon.py
    offsets   whether the last query has another position than the last key
    fixed_max whether one tile's maximum of a row serves for all tiles, as a soft cap keeps exp(s) from overflowing
    formula   a Code of formula.py; None without a formula
    biased    whether that formula only adds a value for each key to s
    added     "distance" or "pair" where a value for each is added to s, and `formula` is None; else None
    exact     whether scores are fp32 and are changed without approximations
    precision of the products of fp32 values, "ieee" or "tf32"
    columns   of a tile: the head size, rounded up

    Kernels assign the fields that they pass on to local names: to Triton 3.6 a member is not a constant. A constexpr
    function takes a field that it compares with None as an argument: from Triton 3.9 on, one that takes MODE reads
    members that are wrapped, and a wrapped None is not None.
    """

    causal: bool
    window: int | None
    documents: bool
    bounded: bool
    horizon: bool
    offsets: bool
    soft_cap: float | None
    alibi: bool
    formula: Any
    biased: bool
    added: str | None
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


def table(rows: dict[tuple[Any, ...], Sequence[tuple[int, ...]]]) -> Table:
    """A Table of rows: the fields of a ConfigKey, and those of each Blocks."""
    return {ConfigKey(*key): KernelConfigs(*(Blocks(*x) for x in blocks)) for key, blocks in rows.items()}


# Compute capability 9.0 and 10.x.
HOPPER = table(
    {
        (64, False, 2048): ((64, 64, 4, 2, 96), (64, 64, 4, 2), (64, 64, 4, 2)),
        (64, False, 8192): ((64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
        (64, False): ((64, 128, 4, 2), (128, 64, 4, 3), (64, 64, 4, 2)),
        (64, True, 2048): ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, 168)),
        (64, True, 8192): ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2)),
        (64, True): ((128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 2)),
        (128, False, 512): ((128, 64, 4, 2), (128, 32, 4, 3), (64, 64, 4, 2)),
        (128, False, 2048): ((64, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 2)),
        (128, False, 8192): ((128, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 2)),
        (128, False): ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
        (128, True, 2048): ((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),
        (128, True): ((128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
        (256, False): ((128, 64, 8, 2), (64, 64, 4, 1), (64, 64, 8, 1)),
        (256, True): ((128, 64, 8, 2), (64, 64, 4, 1), (32, 64, 8, 2)),
    }
)
# The same GPUs where scores are changed or bounded, timed at 16k tokens; HOPPER's entry is used where a table has none.
HOPPER_SCORES = {
    "bounded": table(
        {
            (64, False): ((64, 64, 4, 2, 96), (64, 32, 4, 3), (64, 64, 4, 3, 168)),
            (128, False): ((64, 64, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2)),
        }
    ),
    "alibi": table(
        {
            (64, False): ((64, 128, 4, 2, 168), (64, 64, 4, 3), (64, 64, 4, 3, 168)),
            (64, True): ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2)),
        }
    ),
    "soft_cap": table(
        {
            (64, False): ((64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
            (64, True): ((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
            (128, False): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)),
        }
    ),
}
# Ampere, Ada and whatever else has 99 KiB of shared memory for a program; the same with dropout and without.
OLDER_BLOCKS: dict[int, Sequence[tuple[int, ...]]] = {
    64: ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2)),
    128: ((64, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 2)),
    256: ((64, 64, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1)),
}
OLDER = table({(head_dim, dropout): x for head_dim, x in OLDER_BLOCKS.items() for dropout in (False, True)})
# fp32 without tensor cores: every multiplication is an instruction, so small tiles keep compilation to seconds.
FP32 = table(
    {
        (64, True): ((32, 64, 4, 1), (16, 64, 4, 1), (16, 64, 4, 1)),
        (128, True): ((32, 64, 8, 1), (16, 64, 8, 1), (16, 64, 8, 1)),
        (256, True): ((16, 64, 8, 1), (16, 64, 8, 1), (16, 64, 8, 1)),
    }
)
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


class Options(NamedTuple):
    """A formula as options of a Score, and the formula's names of their tensors: pairs, as torch.compile takes them."""

    values: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, str], ...]


@constant_when_compiled
def recognised(text: str) -> Options | None:
    """The options whose formula this is; None where there are none."""
    values: dict[str, Any] = {}
    tensors: dict[str, str] = {}
    x = parse(text)
    for option in reversed(OPTIONS):
        if (match := option.recognised(x)) is not None:
            x, values[option.name] = match.before, match.value
            tensors |= match.tensors
    return Options((*values.items(),), (*tensors.items(),)) if values and x is leaf("s") else None


def has_code(score: Score) -> bool:
    """Whether the kernels have code for all options of a score."""
    return score.formula is None and all(option.in_kernels for option, _ in score.options)


def with_options(score: Score) -> Score:
    """The same score for the kernels: with options in place of a formula that they recognise, and the other way round.

    A factor of s alone is multiplied into the queries and leaves the kernels nothing to do.
    """
    return score if has_code(score) else as_options(*score.values) or score


@constant_when_compiled
def as_options(*values: Any) -> Score | None:
    """`with_options` for a score's values; None where that is a formula which stays as it is.

    The compiler of torch 2.11 can pass no Score to a constant function, nor call a method of one that such a function
    returns.
    """
    score = Score(*values)
    found, steps = recognised(str(score.expression)), score.steps()
    off = {option.name: option.default for option in OPTIONS if option.is_formula}
    if steps is not None and steps.is_identity:
        return replace(score, formula=None, **off)
    on = {} if found is None else dict(found.values)
    looks_back = any(option.looks_back and option.name in on for option in OPTIONS)
    if on and (score.causal or not looks_back):
        return replace(score, formula=None, **(off | on))
    return None if score.formula is not None else replace(score, formula=score.expression, **off)
