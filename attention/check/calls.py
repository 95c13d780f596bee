"""A call's results, and the judge's reference problem for a call of an Attention, made from its Score, Layout and
tensors by definition."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..dropout import DropoutKey, keep_mask
from ..formula.parse import parse
from ..formula.plan import has_steps
from ..layout import Layout
from ..score import Score
from .formula import Change, Problem

# The features of scores and layouts that the formula knows.
KNOWN_FEATURES = frozenset({"full", "window", "soft_cap", "alibi", "sinks", "documents", "offsets", "formula"})


def results_of(
    call: Callable[[], tuple[Tensor, Tensor | None]], leaves: dict[str, Tensor], do: Tensor
) -> dict[str, Tensor | None]:
    """out, the log-sum-exp where there is one, and gradients, detached; None for one that autograd does not give.

    call    gives out and the log-sum-exp
    leaves  the tensors that need a gradient, by the names of these; without any, gradients are off
    do      the gradient of out
    """
    for leaf in leaves.values():
        leaf.requires_grad_()
    with torch.set_grad_enabled(bool(leaves)):
        out, lse = call()
    results: dict[str, Tensor | None] = {"out": out.detach()}
    if lse is not None:
        results["lse"] = lse.detach()
    if not leaves:
        return results
    with torch.autocast(out.device.type, enabled=False):  # training's backward pass is outside it too
        found = torch.autograd.grad(out, list(leaves.values()), do.to(out.dtype), allow_unused=True)
    return results | dict(zip(leaves, found, strict=True))


def weights_shown(attend: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """The weights (B, H, T, S) after dropout, which the output is where v has a single 1 in each column.

    attend  gives the output for values like v (B, H_kv, S, D)
    """
    (S, D), parts = v.shape[2:], []
    for first in range(0, S, D):
        n = min(D, S - first)
        one_hot = torch.zeros_like(v)
        one_hot[:, :, first : first + n, :n] = torch.eye(n, dtype=v.dtype, device=v.device)
        parts.append(attend(one_hot)[..., :n])
    return torch.cat(parts, dim=-1)


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
    tensors  slopes (H,) and sinks (H,), where the score needs them, and those of its formula

    Raises NotImplementedError for a score or a layout that the judge's formula does not know.
    """
    unknown = (score.features().keys() | layout.features().keys()) - KNOWN_FEATURES
    if unknown:
        raise NotImplementedError(f"the judge does not know {', '.join(sorted(unknown))}")
    if score.formula is not None and has_steps(parse(str(score.formula))):
        raise NotImplementedError("its formula compares s, and rounding decides on which side a score falls")
    B, _, T, D = q.shape
    S = k.shape[2]
    of_score, threshold = tensors or {}, round(256 * dropout) if dropout_key is not None else 0
    if isinstance(dropout_key, Tensor):  # packed
        dropout_key = DropoutKey(*dropout_key.unbind())
    seen, i, j = visible(score, layout, B, T, S, q.device)

    def problem(heads: slice) -> Problem:
        shift = keep = change = None
        if score.alibi:
            shift = -of_score["slopes"][heads].double()[:, None, None] * (i - j)
        if score.formula is not None:
            of_options = [tensor.name for tensor in score.head_tensors]
            named = {name: of_score[name] for name in score.tensors() if name not in of_options}
            change = change_of(str(score.formula), B, seen, i, j, heads, named)
        if threshold and dropout_key is not None:
            key = replace(dropout_key, first_head=dropout_key.first_head + heads.start)
            keep = keep_mask(key, dropout, B, heads.stop - heads.start, T, S, device=q.device)
        return Problem(
            scale=1 / math.sqrt(D) if scale is None else scale,
            seen=seen,
            soft_cap=score.soft_cap,
            shift=shift,
            sinks=of_score["sinks"][heads] if score.sinks else None,
            keep=keep,
            keep_scale=256 / (256 - threshold),
            change=change,
        )

    return problem


def change_of(
    text: str, B: int, seen: Tensor, i: Tensor, j: Tensor, heads: slice, tensors: dict[str, Tensor]
) -> Change:
    """The change of some heads' scores by a formula. Pairs that are not seen have the position of their query twice."""
    i = i.clamp(min=0)
    leaves = {
        "i": i,
        "j": torch.where(seen, j, i),
        "h": torch.arange(heads.start, heads.stop, device=seen.device)[:, None, None],
        "b": torch.arange(B, device=seen.device)[:, None, None, None],
        "n": seen.sum(dim=-1, keepdim=True).clamp(min=1),
    }
    return Change(text, leaves, seen, tensors)


def visible(
    score: Score, layout: Layout, B: int, T: int, S: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether queries see keys, (B or 1, 1, T, S) bool, and their positions (T, 1) and (S,)."""
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
        same = starts[:, i[:, 0].clamp(0, starts.shape[1] - 1)][:, :, None] == starts[:, None, j]
        seen = seen & (same & known[:, None]).unsqueeze(1)
    return seen, i, j
