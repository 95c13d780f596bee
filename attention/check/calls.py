"""The judge's reference problem for a call of an Attention, made from its Score, Layout and tensors by definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import DropoutKey, Layout, Score, keep_mask
from .formula import Problem

# The features of scores and layouts that the formula knows.
KNOWN_FEATURES = frozenset({"full", "window", "soft_cap", "alibi", "sinks", "documents", "offsets"})


def problem_of(
    q: Tensor,
    k: Tensor,
    *,
    score: Score,
    layout: Layout,
    scale: float | None = None,
    dropout_key: DropoutKey | Tensor | None = None,
    dropout: float = 0.0,
    tensors: dict[str, Any] | None = None,
) -> Callable[[slice], Problem]:
    """A function that gives the problem of some query heads, for q (B, H, T, D) and k (B, H_kv, S, D).

    dropout  the probability of dropping a weight; it counts only with a dropout_key
    tensors  slopes (H,) and sinks (H,), where the score needs them

    Raises NotImplementedError for a score or a layout that the judge's formula does not know.
    """
    unknown = (score.features().keys() | layout.features().keys()) - KNOWN_FEATURES
    if score.formula is not None:  # no feature where it only multiplies s
        unknown |= {"formula"}
    if unknown:
        raise NotImplementedError(f"the judge does not know {', '.join(sorted(unknown))}")
    B, _, T, D = q.shape
    S = k.shape[2]
    given, threshold = tensors or {}, round(256 * dropout) if dropout_key is not None else 0
    if isinstance(dropout_key, Tensor):  # packed
        dropout_key = DropoutKey(*dropout_key.unbind())
    seen, distance = visible(score, layout, B, T, S, q.device)

    def problem(heads: slice) -> Problem:
        shift = keep = None
        if score.alibi:
            shift = -given["slopes"][heads].double()[:, None, None] * distance
        if threshold and dropout_key is not None:
            key = replace(dropout_key, first_head=dropout_key.first_head + heads.start)
            keep = keep_mask(key, dropout, B, heads.stop - heads.start, T, S, device=q.device)
        return Problem(
            scale=1 / math.sqrt(D) if scale is None else scale,
            seen=seen,
            soft_cap=score.soft_cap,
            shift=shift,
            sinks=given["sinks"][heads] if score.sinks else None,
            keep=keep,
            keep_scale=256 / (256 - threshold),
        )

    return problem


def visible(score: Score, layout: Layout, B: int, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Whether queries see keys, (B or 1, 1, T, S) bool, and their distance (T, S)."""
    first = layout.k_start + S - T if layout.q_start is None else layout.q_start
    i = torch.arange(first, first + T, device=device)[:, None]
    j = torch.arange(layout.k_start, layout.k_start + S, device=device)
    seen = torch.ones(1, 1, T, S, dtype=torch.bool, device=device)
    if score.causal:
        seen = seen & (j <= i)
    if score.window is not None:
        seen = seen & (i - j < score.window)
    if layout.document_starts is not None:
        starts = layout.document_starts.to(device).expand(B, -1)
        known = (i[:, 0] >= 0) & (i[:, 0] < starts.shape[1])
        of_query = starts[:, i[:, 0].clamp(0, starts.shape[1] - 1)]
        same = of_query[:, :, None] == starts[:, None, j]
        seen = seen & (same & known[:, None]).unsqueeze(1)
    return seen, i - j
