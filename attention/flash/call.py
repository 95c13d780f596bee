"""A call as the kernels' launch functions receive it, and the properties that decide its kernels and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gpu
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
        window = self.spec.score.window
        return min(self.keys, window or DOCUMENT_LENGTH) if self.spec.bounded else self.keys

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
