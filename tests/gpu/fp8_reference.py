"""An independent reference for attention.precision=fp8: products of 8-bit numbers in plain torch, the rest in fp32.

Written from FlashAttention-3 (Shah et al. 2024), section 3.3. The rotation differs from the kernels', and the weights
are rounded against a row's true maximum instead of a running one: errors are as large, the numbers are not the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
Q_ROWS, KV_ROWS = 1, 128


def e4m3(x: Tensor) -> Tensor:
    """The nearest 8-bit values, in fp32."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def in_8_bits(x: Tensor, rows: int | None) -> tuple[Tensor, Tensor]:
    """x (B, H, T, D) over its scale, in e4m3, and the scale of every `rows` rows, (B, H, T, 1); None: one for all."""
    if rows is None:
        scale = x.abs().max().expand(*x.shape[:3], 1) / LARGEST
    else:
        T = x.shape[2]
        rows_max = torch.nn.functional.pad(x.abs().amax(-1), (0, -T % rows))
        scale = rows_max.unflatten(-1, (-1, rows)).amax(-1).repeat_interleave(rows, -1)[..., :T, None] / LARGEST
    return e4m3(x / scale), scale


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, one_scale: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of q (B, H, T, D) and k, v (B, H_kv, S, D), in fp32.

    one_scale  without rotation and with one scale a tensor, which the paper compares with
    """
    (H, T, D), S = q.shape[1:], k.shape[2]
    q, k, v = q.float(), k.float(), v.float()
    if not one_scale:
        generator = torch.Generator().manual_seed(0)
        rotation = torch.linalg.qr(torch.randn(D, D, generator=generator))[0].to(q.device)
        q, k = q @ rotation, k @ rotation
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (
        in_8_bits(x, None if one_scale else rows) for x, rows in ((q, Q_ROWS), (k, KV_ROWS), (v, KV_ROWS))
    )
    k8, k_scale, v8, v_scale = (x.repeat_interleave(H // k.shape[1], 1) for x in (k8, k_scale, v8, v_scale))
    s = (q8 @ k8.mT) * q_scale * k_scale.mT / D**0.5
    if causal:
        s = s.masked_fill(torch.ones(T, S, device=s.device).tril(S - T) == 0, -torch.inf)
    # The scale of v joins the weights before they are rounded.
    weighted = s + v_scale.mT.log()
    m = weighted.amax(-1, keepdim=True)
    p = torch.exp(weighted - torch.where(m == -torch.inf, 0.0, m))
    l = (p / v_scale.mT).sum(-1, keepdim=True)
    return torch.where(l > 0, e4m3(16 * p) @ v8 / (16 * l), 0.0)
