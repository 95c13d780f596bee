"""The forward kernel: FlashAttention-2's algorithm 1 (Dao 2023), one tile of queries for each program.

A program keeps a tile of queries, walks over the tiles of keys and values that it sees, and carries the running maximum
m, the running sum l and the unnormalised output o of each row. Nothing of size T x S leaves the chip.

    s = q k^T          m' = max(m, rowmax(scale s))       p = exp(scale s - m')
    l = l exp(m - m') + rowsum(p)                         o = o exp(m - m') + dropout(p) v
    out = o / l        lse = m + log(l)

Base 2 is the hardware's: the kernel carries m and the scale times log2(e), and exp2 stands for exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.flash.configs import KernelConfigs, Options
from attention.flash.philox import drop, keep_tile, load_key
from attention.flash.tiles import (
    INPUT_PRECISION,
    ROW_ALIGNMENT,
    block_columns,
    dot,
    head_group_size,
    load_tile,
    rows_like,
    seen_keys,
    store_tile,
    swizzle_program_id,
    tiles,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_m", "n_together"])
def forward_kernel(
    q,
    k,
    v,
    o,
    p_lse,
    p_lse2,
    p_key,
    scale_log2,
    H,
    G,
    T,
    S,
    n_m,
    n_together,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out and lse of one tile of queries. Grid: n_m tiles x batch x heads, the longest rows first."""
    i_tile, i_bh = swizzle_program_id(n_m, n_together)
    i_m = (n_m - 1 - i_tile) * BM
    i_b, i_h = i_bh // H, i_bh % H
    i_kv = i_h // G

    key = load_key(p_key, i_b, i_h) if THRESHOLD else None
    b_q = load_tile(q, i_b, i_h, i_m, BM, BD)
    b_o = tl.zeros([BM, BD], tl.float32)
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)

    n_full, n_end = seen_keys(i_m, T, S, CAUSAL, BM, BN)
    o_m = i_m + tl.arange(0, BM)
    for i_n in tl.range(0, n_end, BN, num_stages=STAGES):
        # Drawn before the scores, while the previous tile's product with v is still in flight.
        b_keep = keep_tile(key, i_m, i_n, THRESHOLD, BM, BN, False) if THRESHOLD else None
        # (BM, BN)
        b_k = load_tile(k, i_b, i_kv, i_n, BN, BD)
        b_s = dot(b_q, b_k.T, None, PRECISION)
        if i_n >= n_full:
            o_n = i_n + tl.arange(0, BN)
            m_s = o_n[None, :] <= o_m[:, None] + (S - T) if CAUSAL else (o_n < S)[None, :]
            b_s = tl.where(m_s, b_s, -float("inf"))

        # (BM,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale_log2)
        b_m_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_m = b_m_new

        # (BM, BN) l is summed before anything is dropped.
        b_p = tl.exp2(b_s * scale_log2 - b_m_safe[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_p = b_p.to(b_q.dtype)
        if THRESHOLD:
            b_p = drop(b_p, b_keep)

        # (BM, D)
        b_v = load_tile(v, i_b, i_kv, i_n, BN, BD)
        b_o = dot(b_p, b_v, b_o * b_alpha[:, None], PRECISION)

    # Kept weights are rescaled once, here, by the inverse of the keep probability.
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    b_o = b_o * (KEEP_SCALE / b_l)[:, None]
    if CAUSAL:  # rows that see nothing are zero; l = 0 tells less, as scores of -inf give it too
        b_o = tl.where((o_m >= T - S)[:, None], b_o, 0.0)
    store_tile(o, i_b, i_h, i_m, b_o, BM, BD)
    # The backward takes the log-sum-exp in base 2, unrounded by a change of base, and exp2(s - inf) = 0 for a row that
    # saw nothing.
    b_lse2 = b_m + tl.log2(b_l)
    tl.store(p_lse + i_bh.to(tl.int64) * T + o_m, b_lse2 / LOG2_E, mask=o_m < T)
    b_lse2 = tl.where(b_lse2 == -float("inf"), float("inf"), b_lse2)
    T_padded = tl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
    tl.store(p_lse2 + i_bh.to(tl.int64) * T_padded + o_m, b_lse2, mask=o_m < T_padded)


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, key: Tensor | None, options: Options, passes: KernelConfigs
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D), key (4,) int64 or None -> lse (B, H, T) and lse2; fills out, like q.

    lse2 is what the backward needs, see `rows_like`: lse in base 2, +inf for rows that saw nothing.
    """
    B, H, T, D = q.shape
    BD = block_columns(D)
    S = k.shape[2]
    blocks = passes.forward
    lse, lse2 = q.new_empty(B, H, T, dtype=torch.float32), rows_like(q)
    if out.numel() == 0 or S == 0:
        out.zero_()
        return lse.fill_(-torch.inf), lse2.fill_(torch.inf)
    n_m = triton.cdiv(T, blocks.q)
    forward_kernel[(n_m * B * H,)](
        tiles(q, blocks.q, BD),
        tiles(k, blocks.k, BD),
        tiles(v, blocks.k, BD),
        tiles(out, blocks.q, BD),
        lse,
        lse2,
        key,
        options.scale * LOG2_E.value,
        H,
        H // k.shape[1],
        T,
        S,
        n_m,
        head_group_size(B * H, k[0, 0], H // k.shape[1]),
        CAUSAL=options.causal,
        THRESHOLD=options.threshold,
        PRECISION=INPUT_PRECISION[options.tf32],
        BM=blocks.q,
        BN=blocks.k,
        BD=BD,
        STAGES=blocks.stages,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        maxnreg=blocks.registers,
    )
    return lse, lse2
