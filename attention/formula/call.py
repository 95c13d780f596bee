"""The formula of a call: positions of queries and keys, the parts computed before the scores, and tiles of scores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import Layout
from ..precision import accum_dtype
from ..score import Score, key_intervals
from .hoist import CallPlace, Steps, evaluated
from .ranges import Reach
from .rules import check_tensors
from .tile import TileFormula


def reach_of(score: Score, layout: Layout, T: int, S: int, H: int) -> Reach:
    """The range of positions of T queries and S keys."""
    first, keys = layout.query_start(T, S), (layout.k_start, layout.k_start + S - 1)
    queries = (0, S - 1) if layout.lengths is not None else (first, first + T - 1)
    return Reach(queries, keys, score.causal, score.window, H)


def visible_distances(score: Score, layout: Layout, T: int, S: int) -> tuple[int, int]:
    """The lowest and the highest i - j of pairs that can see each other."""
    low, high = reach_of(score, layout, T, S, 1).distance()
    return low, max(high, low)  # type: ignore[return-value]


def positions(layout: Layout, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of queries, (T,) or with lengths (B, T), and of keys, (S,). Queries before 0 count as 0."""
    i = (layout.own_keys(T, S, device) + layout.k_start).clamp(min=0)
    return i, torch.arange(layout.k_start, layout.k_start + S, device=device)


def place_of(score: Score, layout: Layout, q: Tensor, S: int, steps: Steps) -> CallPlace:
    """The positions of queries q (B, H, T, D) and S keys, as far as the hoisted values need them."""
    B, H, T, _ = q.shape
    first = layout.query_start(T, S)
    ordered = layout.lengths is None and first >= 0
    distances = visible_distances(score, layout, T, S)
    place = CallPlace((B, H, T, S), q.device, None, None, None, first if ordered else None, layout.k_start, distances)
    asked = {name for stage, program in steps.programs() for name in place.asked(stage, program)}
    if asked & {"i", "j"}:
        i, j = positions(layout, T, S, q.device)
        place = place._replace(i=i, j=j)
    return place._replace(n=seen_keys(score, layout, T, S, q.device)) if "n" in asked else place


def seen_keys(score: Score, layout: Layout, T: int, S: int, device: torch.device) -> Tensor:
    """The number of S keys that each of T queries sees, at least 1: (T,), or with lengths or documents (B, T)."""
    first = layout.query_start(T, S) - layout.k_start
    bounded = layout.lengths is not None or layout.document_starts is not None or score.window is not None
    if score.causal and not bounded and 0 <= first <= S - T:
        return torch.arange(first + 1, first + 1 + T, device=device)
    seen = key_intervals(score, layout, T, S, device)
    return (seen.end - seen.first).clamp(min=1)


def prepared(
    score: Score, layout: Layout, q: Tensor, S: int, tensors: dict[str, Tensor]
) -> tuple[Tensor | None, float, tuple[Tensor, ...]]:
    """The factors of s, (B or 1, H or 1, T or 1), or a number that scales s; and the inputs of a score's formula.

    Raises FormulaError for tensors that do not fit.
    """
    steps = score.steps()
    assert steps is not None
    assert score.expression is not None
    B, H, T, _ = q.shape
    if not torch.compiler.is_compiling():
        check_tensors(score.expression, tensors, B, reach_of(score, layout, T, S, H))
    place = place_of(score, layout, q, S, steps)
    dtype = accum_dtype(q.dtype)
    factors = None if steps.factor is None else evaluated("row", None, steps.factor, tensors, place, dtype)
    inputs = [evaluated(*hoisted, tensors, place, dtype) for hoisted in steps.hoisted]
    return factors, steps.scale, (*inputs, *(tensors[name] for name, _ in steps.tables))


def tile_formula(
    score: Score, layout: Layout, inputs: Sequence[Tensor], T: int, S: int, device: torch.device
) -> TileFormula | None:
    """The formula of a call of T queries and S keys, for tiles of scores; None where the score is s itself."""
    steps = score.steps()
    if steps is None or steps.is_identity:
        return None
    return TileFormula(steps, inputs, *positions(layout, T, S, device), visible_distances(score, layout, T, S))
