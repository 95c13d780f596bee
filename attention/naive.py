"""The textbook formula with all scores in memory: the reference for the other implementations.

    out = dropout(softmax(scale * q k^T)) v          Vaswani et al. 2017, "Attention Is All You Need", eq. 1

Memory grows with T x S for each head, forward and backward; gradients are autograd's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode.cache import Cache, host_sees
from .dropout import keep_mask, keep_scale
from .formula.call import tile_formula
from .interface import FEATURES, Attention, AttentionOutput, Call
from .layout import Layout
from .precision import accum_dtype
from .score import Range, Score, key_intervals
from .scores.sinks import with_sinks


class NaiveAttention(Attention):
    """Attention by the paper's formula."""

    name = "naive"
    supports = FEATURES | {"lengths"}
    exact = True
    scales_queries = True  # it multiplies the scores, in fp32

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
        longest = cache.longest()
        if q.shape[0] == q.shape[2] == 1 and host_sees(cache.lengths):
            # One query of one sequence, whose length the host knows: pass only its visible keys, without a mask.
            first = int(key_intervals(call.spec.score, Layout(), 1, longest, "cpu").first)
            k, v = cache.read(first, longest)
            scores = with_sinks(changed_scores(q, k, call, (first, longest)), call.tensors.get("sinks"))
            call = call._replace(spec=call.spec._replace(score=Score(causal=False)), layout=Layout())
            return AttentionOutput(self.weigh(scores, v, call))
        k, v = cache.read(0, longest)
        return AttentionOutput(self.weigh(masked_scores(q, k, call), v, call))

    def lse(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return masked_scores(q, k, call).to(accum_dtype(q.dtype)).logsumexp(dim=-1)


def masked_scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """`changed_scores`, (B, H, T, S), -inf where the query does not see the key; with sinks as in `with_sinks`."""
    T, S = q.shape[2], k.shape[2]
    scores = changed_scores(q, k, call, (0, S))
    mask = key_intervals(call.spec.score, call.layout, T, S, q.device).mask((0, T), (0, S))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return with_sinks(scores, call.tensors.get("sinks"))


def changed_scores(q: Tensor, k: Tensor, call: Call, columns: Range) -> Tensor:
    """scale * q k^T, changed as the score says, (B, H, T, S), for the keys k that are these columns of the call's."""
    # Scaled before the product: q k^T alone overflows fp16 where the scores do not.
    scores, T = (q * call.spec.scale) @ shared(k, q.shape[1]).mT, q.shape[2]
    if call.factors is not None:
        scores = scores.to(accum_dtype(q.dtype)) * call.factors.unsqueeze(-1)
    formula = tile_formula(call.spec.score, call.layout, call.formula, T, columns[1], q.device)
    return scores if formula is None else formula.value(scores.to(accum_dtype(q.dtype)), (0, T), columns)


def shared(x: Tensor, H: int) -> Tensor:
    """Keys or values (B, H_kv, S, D) for each of H query heads: (B, H, S, D)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)
