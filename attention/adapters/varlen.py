"""Sequences of different lengths in one call, without padding: prefill, as flash-attn's varlen interface has it.

>>> attend = build_attention(AttentionConfig("flash"))
>>> out = varlen(attend, q, k, v, cu_seqlens=torch.tensor([0, 7, 7, 1031])).out    # three sequences, the second empty
"""

from typing import Any

from torch import Tensor

from ..interface import Attention, AttentionOutput
from ..layout import packed


def varlen(attend: Attention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, **options: Any) -> AttentionOutput:
    """Attend within each of the sequences that lie one after the other.

    q           (total, H, D)
    k, v        (total, H_kv, D)
    cu_seqlens  (n + 1,) integers: the start of each sequence and, last, total. Reading them waits for the device
    options     score, scale, dropout_key, return_lse and the score's tensors, as in Attention.__call__. Dropout
                addresses rows and columns of the whole tensor

    Returns out (total, H, D) and, if asked for, lse (H, total). Raises ScoreError for invalid bounds, ValueError for
    tensors of different totals.
    """
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"Each token has a query, a key and a value: q {tuple(q.shape)} and k {tuple(k.shape)} must agree in total."
        )
    layout = packed(cu_seqlens.to(q.device), q.shape[0])
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # (1, H, total, D)
    out, lse = attend(q, k, v, layout=layout, **options)
    return AttentionOutput(out[0].transpose(0, 1), None if lse is None else lse[0])
