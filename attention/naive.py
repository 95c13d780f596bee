"""The textbook formula, with every score in memory: the reference that the others are measured against.

    out = dropout(softmax(scale * q k^T)) v          Vaswani et al. 2017, "Attention Is All You Need", eq. 1

Memory grows with T x S for each head, forward and backward; gradients are autograd's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dropout import DropoutKey, keep_mask, keep_scale
from attention.interface import Attention, causal_mask


class NaiveAttention(Attention):
    """Attention as the paper writes it."""

    name = "naive"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor]:
        B, H, T, _ = q.shape
        S = k.shape[2]
        group = H // k.shape[1]
        k = k.repeat_interleave(group, dim=1)  # (B, H, S, D)
        v = v.repeat_interleave(group, dim=1)

        # Scaled before the product, not after it: q k^T alone overflows fp16 where the scores do not.
        scores = (q * scale) @ k.transpose(-2, -1)  # (B, H, T, S)
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))  # at least fp32 up to the probabilities
        if causal:
            scores = scores.masked_fill(~causal_mask(T, S, device=q.device), -torch.inf)
        lse = scores.logsumexp(dim=-1)  # (B, H, T)
        # A row that sees nothing has lse = -inf, and exp(-inf - -inf) would be NaN where it has to be zero.
        p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        if dropout_key is not None:
            keep = keep_mask(dropout_key, self.dropout, B, H, T, S, device=q.device)
            p = torch.where(keep, p * keep_scale(self.dropout), 0.0)
        return p.to(q.dtype) @ v, lse
