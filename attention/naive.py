"""The textbook formula with all scores in memory: the reference for the other implementations.

    out = dropout(softmax(scale * q k^T)) v          Vaswani et al. 2017, "Attention Is All You Need", eq. 1

Memory grows with T x S for each head, forward and backward; gradients are autograd's.
"""

import torch
from torch import Tensor

from .decode.cache import Cache
from .dropout import keep_mask, keep_scale
from .formula.call import tile_formula
from .interface import FEATURES, Attention, AttentionOutput, Call
from .precision import accum_dtype
from .score import key_intervals
from .scores.sinks import with_sinks


class NaiveAttention(Attention):
    """Attention by the paper's formula."""

    name = "naive"
    supports = FEATURES | {"lengths"}
    exact = True
    scales_queries = True  # it multiplies the scores, in fp32

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
        (B, H, T, _), S = q.shape, k.shape[2]
        p = masked_scores(q, k, call).softmax(dim=-1, dtype=accum_dtype(v.dtype))
        p = p[..., :S]  # (B, H, T, S), less the sink's share
        seen = key_intervals(call.spec.score, call.layout, T, S, v.device)
        if not seen.never_empty:  # a softmax over nothing is NaN, and should be zero
            p = p.masked_fill(seen.fully_masked((0, T)), 0.0)
        if call.dropout_key is not None:
            keep = keep_mask(call.dropout_key, self.dropout, B, H, T, S, device=v.device)
            p = torch.where(keep, p * keep_scale(self.dropout), 0.0)
        return AttentionOutput(p.to(v.dtype) @ shared(v, H))

    def attend_cache(self, q: Tensor, cache: Cache, call: Call) -> AttentionOutput:
        k, v = cache.read(0, cache.longest())
        return self.attend(q, k, v, call)

    def lse(self, q: Tensor, k: Tensor, call: Call) -> Tensor:
        return masked_scores(q, k, call).to(accum_dtype(q.dtype)).logsumexp(dim=-1)


def masked_scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """scale * q k^T, changed as the score says, (B, H, T, S); -inf where the query does not see the key. With sinks as
    in `with_sinks`."""
    T, S, spec, layout = q.shape[2], k.shape[2], call.spec, call.layout
    # Scaled before the product: q k^T alone overflows fp16 where the scores do not.
    scores = (q * spec.scale) @ shared(k, q.shape[1]).mT
    if call.factors is not None:
        scores = scores.to(accum_dtype(q.dtype)) * call.factors.unsqueeze(-1)
    formula = tile_formula(spec.score, layout, call.formula, T, S, q.device)
    if formula is not None:
        scores = formula.value(scores.to(accum_dtype(q.dtype)), (0, T), (0, S))
    mask = key_intervals(spec.score, layout, T, S, q.device).mask((0, T), (0, S))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return with_sinks(scores, call.tensors.get("sinks"))


def shared(x: Tensor, H: int) -> Tensor:
    """Keys or values (B, H_kv, S, D) for each of H query heads: (B, H, S, D)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)
