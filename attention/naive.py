"""The textbook formula with all scores in memory: the reference for the other implementations.

    out = dropout(softmax(scale * q k^T)) v          Vaswani et al. 2017, "Attention Is All You Need", eq. 1

Memory grows with T x S for each head, forward and backward; gradients are autograd's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .decode.cache import Cache, host_sees
from .dropout import keep_mask, keep_scale
from .interface import FEATURES, Attention, AttentionOutput, Terms, accum_dtype
from .score import Layout, change_scores, key_intervals


class NaiveAttention(Attention):
    """Attention as the paper writes it."""

    name = "naive"
    supports = FEATURES | {"lengths"}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> AttentionOutput:
        return AttentionOutput(self.weigh(masked_scores(q, k, terms), v, terms))

    def weigh(self, scores: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """dropout(softmax(scores)) v, (B, H, T, D), for scores of `masked_scores`."""
        (B, H, T, _), S = scores.shape, v.shape[2]
        p = scores.softmax(dim=-1, dtype=accum_dtype(v.dtype))[..., :S]  # (B, H, T, S), less the sink's share
        seen = key_intervals(terms.score, terms.layout, T, S, v.device)
        if not seen.never_empty:  # a softmax over nothing is NaN, and should be zero
            p = p.masked_fill(seen.fully_masked((0, T)), 0.0)
        if terms.dropout_key is not None:
            keep = keep_mask(terms.dropout_key, self.dropout, B, H, T, S, device=v.device)
            p = torch.where(keep, p * keep_scale(self.dropout), 0.0)
        return p.to(v.dtype) @ shared(v, H)

    def attend_cache(self, q: Tensor, cache: Cache, terms: Terms) -> AttentionOutput:
        first, score = 0, terms.score
        if q.shape[0] == q.shape[2] == 1 and host_sees(cache.lengths):
            # One query of one sequence, whose length the host knows: it gets only the keys it sees, and needs no mask.
            first = max(0, cache.longest() - (score.window or cache.longest()))
            score = replace(score, causal=score.alibi, window=None)
            terms = terms._replace(score=score, layout=Layout())
        k, v = cache.read(first, cache.longest())
        return AttentionOutput(self.weigh(masked_scores(q, k, terms), v, terms))

    def lse(self, q: Tensor, k: Tensor, terms: Terms) -> Tensor:
        return masked_scores(q, k, terms).to(accum_dtype(q.dtype)).logsumexp(dim=-1)


def masked_scores(q: Tensor, k: Tensor, terms: Terms) -> Tensor:
    """scale * q k^T, changed as the score says, (B, H, T, S), -inf where the query does not see the key.

    With sinks (B, H, T, S + 1): they stand in the last column.
    """
    (B, H, T, _), S = q.shape, k.shape[2]
    # Scaled before the product: q k^T alone overflows fp16 where the scores do not.
    scores = (q * terms.scale) @ shared(k, H).mT
    if terms.score.soft_cap is not None or terms.slopes is not None:
        slopes = None if terms.slopes is None else terms.slopes[:, None, None]
        scores = scores.to(accum_dtype(q.dtype))
        scores = change_scores(scores, terms.score, terms.layout, slopes, (0, T), (0, S), T, S)
    mask = key_intervals(terms.score, terms.layout, T, S, q.device).mask((0, T), (0, S))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.to(accum_dtype(q.dtype))[:, None, None].expand(B, H, T, 1)
        scores = torch.cat([scores.to(sinks.dtype), sinks], dim=-1)
    return scores


def shared(x: Tensor, H: int) -> Tensor:
    """Keys or values (B, H_kv, S, D) for each of H query heads: (B, H, S, D)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)
