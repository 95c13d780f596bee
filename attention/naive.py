"""The textbook formula, with every score in memory: the reference that the others are measured against.

    out = dropout(softmax(scale * q k^T)) v          Vaswani et al. 2017, "Attention Is All You Need", eq. 1

Memory grows with T x S for each head, forward and backward; gradients are autograd's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dropout import DropoutKey, keep_mask, keep_scale
from attention.interface import Attention, accum_dtype, causal_mask


class NaiveAttention(Attention):
    """Attention as the paper writes it."""

    name = "naive"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, None]:
        (B, H, T, _), S = q.shape, k.shape[2]
        p = masked_scores(q, k, causal, scale).softmax(dim=-1, dtype=accum_dtype(q.dtype))  # (B, H, T, S)
        if causal and T > S:  # rows that see nothing: a softmax over nothing is NaN, and should be zero
            p = p.masked_fill(~causal_mask(T, S, device=q.device), 0.0)
        if dropout_key is not None:
            keep = keep_mask(dropout_key, self.dropout, B, H, T, S, device=q.device)
            p = torch.where(keep, p * keep_scale(self.dropout), 0.0)
        return p.to(q.dtype) @ v.repeat_interleave(H // v.shape[1], dim=1), None

    def lse(self, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        return masked_scores(q, k, causal, scale).to(accum_dtype(q.dtype)).logsumexp(dim=-1)


def masked_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """scale * q k^T, (B, H, T, S), -inf where the query does not see the key."""
    (_, H, T, _), S = q.shape, k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)  # (B, H, S, D)
    scores = (q * scale) @ k.mT  # scaled before the product: q k^T alone overflows fp16 where the scores do not
    return scores.masked_fill(~causal_mask(T, S, device=q.device), -torch.inf) if causal else scores
