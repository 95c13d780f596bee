"""What attention computes: which keys a query sees, and how scores are changed. Every implementation reads it.

    Score    fixed for a layer: what a kernel is compiled for
    Layout   where queries and keys stand, and which document each belongs to: tensors of a batch

The visible keys of a query are always one interval, also when everything is combined. `key_intervals` computes it;
masks, the tiles to visit and the rows that see nothing all follow from it.

    s = formula(scale q k^T, i, j, ...)          i and j are positions; attention/formula reads formulas
    p = exp(s) / (exp(sink_h) + sum over visible keys of exp(s))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import Option, ScoreError
from .formula.check import check
from .formula.hoist import Steps, steps_of
from .formula.trace import trace
from .scores.alibi import formula as alibi_formula
from .scores.soft_cap import formula as soft_cap_formula

Range = tuple[int, int]  # start, stop
# The types of Score's fields, in Python and in words. To Python a bool is an int; here it is not.
KINDS = {
    "causal": (bool, "true or false"),
    "window": (int | None, "a whole number"),
    "soft_cap": (int | float | None, "a number"),
    "alibi": (bool, "true or false"),
    "sinks": (bool, "true or false"),
    "formula": (str | None, "text such as s * log(n)"),
}


@dataclass(frozen=True)
class Score:
    """Who sees whom and how scores are changed, in one layer. Hashable.

    causal    a query sees no key after its own position
    window    keys a query sees, its own included; None: all. Beltagy et al. 2020, "Longformer"; Jiang et al. 2023,
              "Mistral 7B"
    soft_cap  c in c tanh(s / c), which keeps scores between -c and c; None: no cap. Gemma Team 2024, "Gemma 2"
    alibi     subtract slope_h (i - j) from the score of query i and key j. Press et al. 2022, "Train Short, Test Long"
    sinks     a learned logit for each head joins the softmax's sum. Xiao et al. 2023, "Efficient Streaming Language
              Models with Attention Sinks"; gpt-oss
    formula   what the score becomes, instead of a soft cap and ALiBi: text such as "s - slope[h] * (i - j)", of which
              attention/formula/ knows the language, or a Python function of s, i, j, h, n and tensors. None: s

    Raises ScoreError.
    """

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    formula: str | Callable | None = None

    def __post_init__(self) -> None:
        if callable(self.formula):
            object.__setattr__(self, "formula", trace(self.formula))
        for name, (kind, words) in KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ScoreError("{} must be {}.", Option(f"score.{name}", value), words)
        if self.window is not None and self.window < 1:
            window = Option("score.window", self.window)
            raise ScoreError("{} must be at least 1, the query's own key; leave it out for all keys.", window)
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            soft_cap = Option("score.soft_cap", self.soft_cap)
            raise ScoreError("{} must be positive and finite; leave it out for no cap.", soft_cap)
        if not self.causal and (self.window is not None or self.alibi):
            raise ScoreError("A window and ALiBi look back from the query: they need causal=True.")
        if self.formula is not None:
            for option in (Option("score.soft_cap", self.soft_cap), Option("score.alibi", self.alibi)):
                if option.value not in (None, False):
                    raise ScoreError(
                        "{} and {} both change the score; write the formula of both, or leave one out.",
                        *(Option("score.formula", self.formula), option),
                    )
            check(self.formula, self.causal, self.window)

    @property
    def expression(self) -> str | None:
        """The formula of the score, whichever option gives it; None where the score is s."""
        if self.formula is not None:
            return str(self.formula)
        text = None if self.soft_cap is None else soft_cap_formula(self.soft_cap)
        return alibi_formula(text or "s") if self.alibi else text

    def steps(self) -> Steps | None:
        """How the formula is computed; None where the score is s."""
        expression = self.expression
        return None if expression is None else steps_of(expression, self.causal, self.window)

    def features(self) -> dict[str, Option]:
        """The features beyond plain causal attention: name -> the choice that asks for it."""
        asked = {
            "full": None if self.causal else Option("score.causal", False),
            "window": None if self.window is None else Option("score.window", self.window),
            "soft_cap": None if self.soft_cap is None else Option("score.soft_cap", self.soft_cap),
            "alibi": Option("score.alibi") if self.alibi else None,
            "sinks": Option("score.sinks") if self.sinks else None,
        }
        if self.formula is not None and (steps := self.steps()) is not None and not steps.is_identity:
            asked["formula"] = Option("score.formula", self.formula)
        return {name: option for name, option in asked.items() if option is not None}

    def tensors(self) -> dict[str, tuple[str, ...]]:
        """The tensors that a call needs for this score, by name, with the meaning of each axis (formula/axes.py).

        slopes  (H,), of ALiBi; those of Press et al. where a call gives none
        sinks   (H,), logits that join the softmax's sum

        and those that the formula names, which can have a batch before these axes.
        """
        steps = self.steps()
        return ({} if steps is None else dict(steps.axes)) | ({"sinks": ("head",)} if self.sinks else {})


class Layout(NamedTuple):
    """Where the queries and keys of a call stand in their rows, and where the rows' documents begin and end.

    q_start          position of the first query; None: the last query stands at the last key's position
    k_start          position of the first key
    document_starts  (B, L) int32, for each position of a row the start of its document; None: one document
    document_ends    (B, L) int32, one past the document's last position
    lengths          (B,) int32: of the S keys, those that each sequence has, its queries standing at the last of them;
                     for caches. None: S. Not to be combined with the other fields

    The shapes do not depend on the number of documents, so new documents neither cause recompilation nor invalidate a
    CUDA graph. A kernel finds the bounds of a tile of queries in its first and last entries.
    """

    q_start: int | None = None
    k_start: int = 0
    document_starts: Tensor | None = None
    document_ends: Tensor | None = None
    lengths: Tensor | None = None

    def query_start(self, T: int, S: int) -> int:
        """Position of the first of T queries that attend to S keys."""
        return self.k_start + S - T if self.q_start is None else self.q_start

    def own_keys(self, T: int, S: int, device: torch.device | str) -> Tensor:
        """For each of T queries the index of the key at its own position: (T,), or with lengths (B, T)."""
        if self.lengths is not None:
            return self.lengths[:, None] - T + torch.arange(T, device=device)
        offset = self.query_start(T, S) - self.k_start
        return torch.arange(offset, offset + T, device=device)

    def features(self) -> dict[str, Option]:
        """The features beyond one document with default positions: name -> the choice that asks for it."""
        asked = {
            "documents": self.document_starts is not None,
            "lengths": self.lengths is not None,
            "offsets": self.offsets(),
        }
        return {name: Option(f"layout.{name}") for name, is_asked in asked.items() if is_asked}

    def offsets(self) -> bool:
        """Whether the caller gives positions other than the default ones."""
        return self.q_start is not None or self.k_start != 0


def documents(starts: Tensor) -> Layout:
    """The layout of rows whose token t belongs to the document that begins at starts[b, t]: (B, L) int32.

    Runs on the tensor's device without waiting for it.
    """
    ends = torch.searchsorted(starts, starts, right=True, out_int32=True)
    return Layout(document_starts=starts, document_ends=ends)


def packed(cu_seqlens: Tensor, length: int) -> Layout:
    """The layout of one row of `length` tokens that documents lie side by side in.

    cu_seqlens  (n + 1,) integers, where each document begins and, last, the row's length, as flash-attn's varlen has
                them. Two equal ones are an empty document.

    Reads the values, so it waits for the device. Raises ScoreError.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        shape, dtype = tuple(cu_seqlens.shape), cu_seqlens.dtype
        raise ScoreError(f"cu_seqlens of shape {shape} and {dtype} must be a 1-D tensor of integers.")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0:
        raise ScoreError(f"cu_seqlens={shown(bounds)} must start at 0.")
    for before, after in pairwise(bounds):
        if after < before:
            raise ScoreError(f"cu_seqlens={shown(bounds)} must not decrease, as it does from {before} to {after}.")
    if bounds[-1] != length:
        raise ScoreError(f"cu_seqlens={shown(bounds)} must end at the row's length, {length}.")
    cu_seqlens = cu_seqlens.to(torch.int32)
    positions = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    following = torch.searchsorted(cu_seqlens, positions, right=True)
    return Layout(document_starts=cu_seqlens[following - 1][None], document_ends=cu_seqlens[following][None])


def shown(bounds: list[int]) -> str:
    """A list for an error message, its middle left out."""
    return str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"


def take_rows(x: Tensor, rows: tuple[Range, ...], dim: int) -> Tensor:
    """The parts of x that lie at `rows` of a dimension, one after the other; a view where it is one part."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class KeyIntervals(NamedTuple):
    """The keys that each query sees: those from `first` up to, but not including, `end`.

    first, end     (T,) or, with documents or lengths, (B, T) integers
    begins, stops  whether `first` is ever above 0 and `end` ever below the number of keys
    never_empty    whether every query is certain to see a key: one that stands among the keys sees its own position
    """

    first: Tensor
    end: Tensor
    begins: bool
    stops: bool
    never_empty: bool

    def mask(self, rows: Range, columns: Range) -> Tensor | None:
        """True where the query sees the key, (rows, columns) or (B, 1, rows, columns); None where all are seen."""
        j = torch.arange(*columns, device=self.end.device)
        mask = None
        if self.stops:
            mask = j < self.end[..., slice(*rows), None]
        if self.begins:
            after = j >= self.first[..., slice(*rows), None]
            mask = after if mask is None else mask & after
        return mask.unsqueeze(-3) if mask is not None and mask.ndim == 3 else mask

    def fully_masked(self, rows: Range) -> Tensor:
        """True for the queries that see nothing, (rows, 1) or (B, 1, rows, 1)."""
        fully_masked = (self.end <= self.first)[..., slice(*rows), None]
        return fully_masked.unsqueeze(-3) if fully_masked.ndim == 3 else fully_masked

    def meet(self, rows: Range, columns: Range) -> bool:
        """Whether one of the rows sees one of the columns. Looks at values."""
        first, end = self.first[..., slice(*rows)], self.end[..., slice(*rows)]
        return bool(((first < columns[1]) & (end > columns[0]) & (first < end)).any())

    def cover(self, rows: Range, columns: Range) -> bool:
        """Whether every row sees every column. Looks at values."""
        first, end = self.first[..., slice(*rows)], self.end[..., slice(*rows)]
        return bool(((first <= columns[0]) & (end >= columns[1])).all())


def key_intervals(score: Score, layout: Layout, T: int, S: int, device: torch.device | str) -> KeyIntervals:
    """The keys that each of T queries sees, as indices from 0 to S among the call's keys, whatever their positions."""
    own = layout.own_keys(T, S, device)
    first, end = torch.zeros_like(own), torch.full_like(own, S)
    if layout.lengths is not None:
        end = torch.minimum(end, layout.lengths[:, None])
    if score.causal:
        end = torch.minimum(end, (own + 1).clamp(min=0))
    if score.window is not None:
        first = (own - (score.window - 1)).clamp(min=0)
    if layout.document_starts is not None and layout.document_ends is not None:
        position = own + layout.k_start
        known = (position >= 0) & (position < layout.document_starts.shape[1])
        position = torch.where(known, position, 0)
        starts = layout.document_starts.to(device)[:, position] - layout.k_start  # (B, T)
        ends = layout.document_ends.to(device)[:, position] - layout.k_start
        # A query before the row's first position, or behind its last one, belongs to no document.
        first, end = torch.maximum(first, starts), torch.minimum(end, torch.where(known, ends, 0))
    bounded = layout.document_starts is not None or layout.lengths is not None
    offset = layout.query_start(T, S) - layout.k_start  # of the first query from the first key
    among_keys = layout.lengths is None and offset >= 0 and offset + T <= S
    return KeyIntervals(
        first,
        end,
        begins=layout.document_starts is not None or score.window is not None,
        stops=bounded or score.causal,
        never_empty=S > 0 and (among_keys or not (bounded or score.causal)),
    )


def visible_pairs(score: Score, T: int) -> float:
    """Pairs of a query and a key it sees among T tokens, the diagonal counted half as FLOP formulas do: T^2 / 2."""
    if not score.causal:
        return float(T * T)
    window = min(score.window or T, T)
    return window * T - window**2 / 2
