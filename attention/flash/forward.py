"""The forward kernel: FlashAttention-2's algorithm 1 (Dao 2023), one tile of queries for each program.

A program keeps a tile of queries, walks over the tiles of keys and values that it sees, and carries the running maximum m,
the running sum l and the unnormalised output o of each row. Nothing of size T x S leaves the chip.

    s = q k^T          m' = max(m, rowmax(scale s))       p = exp(scale s - m')
    l = l exp(m - m') + rowsum(p)                         o = o exp(m - m') + dropout(p) v
    out = o / l        lse = m + log(l)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.flash.configs import Blocks
from attention.flash.philox import drop, keep_tile, load_key
from attention.flash.tiles import INPUT_PRECISION, descriptor, dot, load_tile, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward_step(
    b_o,
    b_m,
    b_l,
    b_q,
    k,
    v,
    key,
    i_b,
    i_g,
    i_m,
    i_n,
    scale_log2,
    T,
    S,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries at i_m meet keys and values at i_n."""
    BM: tl.constexpr = b_q.shape[0]
    BN: tl.constexpr = k.block_shape[2]

    # (BM, BN)
    b_k = load_tile(k, i_b, i_g, i_n)
    b_s = dot(b_q, b_k.T, None, PRECISION)
    if MASKED:
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        m_s = o_n[None, :] <= o_m[:, None] + (S - T) if CAUSAL else (o_n < S)[None, :]
        b_s = tl.where(m_s, b_s, -float("inf"))

    # (BM,)
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
    # A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    b_m_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
    b_rescale = tl.exp2(b_m - b_m_safe)

    # (BM, BN)
    b_p = tl.exp2(b_s * scale_log2 - b_m_safe[:, None])
    b_l = b_l * b_rescale + tl.sum(b_p, 1)
    b_p = b_p.to(b_q.dtype)
    if THRESHOLD:
        b_p = drop(b_p, keep_tile(key, i_m, i_n, THRESHOLD, BM, BN, False))

    # (BM, D)
    b_v = load_tile(v, i_b, i_g, i_n)
    b_o = dot(b_p, b_v, b_o * b_rescale[:, None], PRECISION)
    return b_o, b_m_new, b_l


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_m"])
def forward_kernel(
    q,
    k,
    v,
    o,
    p_lse,
    p_key,
    scale_log2,
    H,
    G,
    T,
    S,
    n_m,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out and lse of one tile of queries. Grid: n_m tiles x batch x heads, the longest rows first."""
    BM: tl.constexpr = q.block_shape[2]
    BN: tl.constexpr = k.block_shape[2]
    BD: tl.constexpr = q.block_shape[3]
    n_bh = tl.num_programs(0) // n_m
    i_m = (n_m - 1 - tl.program_id(0) // n_bh) * BM
    i_bh = tl.program_id(0) % n_bh
    i_b, i_h = i_bh // H, i_bh % H
    i_g = i_h // G

    key = load_key(p_key, i_b, i_h) if THRESHOLD else None
    b_q = load_tile(q, i_b, i_h, i_m)
    b_o = tl.zeros([BM, BD], tl.float32)
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)

    # Key tiles that every query of this tile sees whole, then those cut by the diagonal or by the end of the sequence.
    if CAUSAL:
        n_full = tl.minimum(tl.maximum(i_m + 1 + S - T, 0), S) // BN * BN
        n_end = tl.minimum(tl.maximum(i_m + BM + S - T, 0), S)
    else:
        n_full = S // BN * BN
        n_end = S
    for i_n in tl.range(0, n_full, BN, num_stages=STAGES):
        b_o, b_m, b_l = forward_step(
            b_o, b_m, b_l, b_q, k, v, key, i_b, i_g, i_m, i_n, scale_log2, T, S, CAUSAL, False, THRESHOLD, PRECISION
        )
    for i_n in tl.range(n_full, n_end, BN, num_stages=STAGES):
        b_o, b_m, b_l = forward_step(
            b_o, b_m, b_l, b_q, k, v, key, i_b, i_g, i_m, i_n, scale_log2, T, S, CAUSAL, True, THRESHOLD, PRECISION
        )

    # Kept weights are rescaled once, here, by the inverse of the keep probability. A row that saw nothing is zero.
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    b_o = tl.where(b_l[:, None] == 0.0, 0.0, b_o * (KEEP_SCALE / b_l)[:, None])
    store_tile(o, i_b, i_h, i_m, b_o)
    o_m = i_m + tl.arange(0, BM)
    tl.store(p_lse + i_bh.to(tl.int64) * T + o_m, (b_m + tl.log2(b_l)) / LOG2_E, mask=o_m < T)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: Tensor | None,
    causal: bool,
    scale: float,
    threshold: int,
    tf32: bool,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D), key (4,) int64 or None -> out like q, lse (B, H, T) in fp32."""
    B, H, T, _ = q.shape
    S = k.shape[2]
    out = torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    n_m = triton.cdiv(T, blocks.q)
    forward_kernel[(n_m * B * H,)](
        descriptor(q, blocks.q),
        descriptor(k, blocks.k),
        descriptor(v, blocks.k),
        descriptor(out, blocks.q),
        lse,
        key,
        scale * LOG2_E.value,
        H,
        H // k.shape[1],
        T,
        S,
        n_m,
        CAUSAL=causal,
        THRESHOLD=threshold,
        PRECISION=INPUT_PRECISION[tf32],
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out, lse
