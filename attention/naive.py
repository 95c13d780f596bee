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
from .interface import FEATURES, Attention, AttentionOutput, Call
from .precision import accum_dtype
from .score import Layout, change_scores, key_intervals


class NaiveAttention(Attention):
    """Attention as the paper writes it."""

    name = "naive"
    supports = FEATURES | {"lengths"}
    exact = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        return AttentionOutput(self.weigh(masked_scores(q, k, call), v, call))

    def weigh(self, scores: Tensor, v: Tensor, call: Call) -> Tensor:
        """dropout(softmax(scores)) v, (B, H, T, D), for scores of `masked_scores`."""
        (B, H, T, _), S = scores.shape, v.shape[2]
        p = scores.softmax(dim=-1, dtype=accum_dtype(v.dtype))[..., :S]  # (B, H, T, S), less the sink's share
        seen = key_intervals(call.spec.score, call.layout, T, S, v.device)
        if not seen.never_empty:  # a softmax over nothing is NaN, and should be zero
            p = p.masked_fill(seen.fully_masked((0, T)), 0.0)
        if call.dropout_key is not None:
            keep = keep_mask(call.dropout_key, self.dropout, B, H, T, S, device=v.device)
            p = torch.where(keep, p * keep_scale(self.dropout), 0.0)
        return p.to(v.dtype) @ shared(v, H)

    def attend_cache(self, q: Tensor, cache: Cache, call: Call) -> AttentionOutput:
        first, score = 0, call.spec.score
        if q.shape[0] == q.shape[2] == 1 and host_sees(cache.lengths):
            # One query of one sequence, whose length the host knows: it gets only the keys it sees, and needs no mask.
            first = max(0, cache.longest() - (score.window or cache.longest()))
            score = replace(score, causal=score.alibi, window=None)
            call = call._replace(spec=call.spec._replace(score=score), layout=Layout())
        k, v = cache.read(first, cache.longest())
        return AttentionOutput(self.weigh(masked_scores(q, k, call), v, call))

    def lse(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return masked_scores(q, k, call).to(accum_dtype(q.dtype)).logsumexp(dim=-1)


def masked_scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """scale * q k^T, changed as the score says, (B, H, T, S), -inf where the query does not see the key.

    With sinks (B, H, T, S + 1): they stand in the last column.
    """
    (B, H, T, _), S = q.shape, k.shape[2]
    score, layout = call.spec.score, call.layout
    # Scaled before the product: q k^T alone overflows fp16 where the scores do not.
    scores = (q * call.spec.scale) @ shared(k, H).mT
    if score.soft_cap is not None or score.alibi:
        slopes = call.tensors["slopes"][:, None, None] if score.alibi else None
        scores = scores.to(accum_dtype(q.dtype))
        scores = change_scores(scores, score, layout, slopes, (0, T), (0, S), T, S)
    mask = key_intervals(score, layout, T, S, q.device).mask((0, T), (0, S))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if score.sinks:
        sinks = call.tensors["sinks"].to(accum_dtype(q.dtype))[:, None, None].expand(B, H, T, 1)
        scores = torch.cat([scores.to(sinks.dtype), sinks], dim=-1)
    return scores


def shared(x: Tensor, H: int) -> Tensor:
    """Keys or values (B, H_kv, S, D) for each of H query heads: (B, H, S, D)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)
