"""The backward kernels: FlashAttention-2's algorithm 2 (Dao 2023), in two passes that never share an accumulator.

The probabilities are recomputed from the log-sum-exp, and dropout's mask M is drawn again. With c the inverse of the
keep probability, ~p = c M p the weights that met v, and delta = rowsum(do * o):

    dv = ~p^T do        dp = do v^T        ds = p (c M dp - delta)        dq = scale ds k        dk = scale ds^T q

`dq_kernel` gives a tile of queries to each program, `dkdv_kernel` a tile of keys: no atomics, so gradients are bitwise
reproducible and need no workspace of their own size. Computing s and dp twice is what that costs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.flash.configs import Blocks
from attention.flash.forward import LOG2_E
from attention.flash.philox import drop, keep_tile, load_key
from attention.flash.tiles import INPUT_PRECISION, addressable, descriptor, dot, load_row, load_tile, store_tile


@triton.jit
def dq_step(
    b_dq,
    b_q,
    b_do,
    b_lse,
    b_delta,
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
    """Queries at i_m collect their gradient from keys and values at i_n."""
    BM: tl.constexpr = b_q.shape[0]
    BN: tl.constexpr = k.block_shape[2]
    b_k = load_tile(k, i_b, i_g, i_n)
    b_v = load_tile(v, i_b, i_g, i_n)

    # (BM, BN)
    b_s = dot(b_q, b_k.T, None, PRECISION)
    b_dp = dot(b_do, b_v.T, None, PRECISION)
    b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
    if MASKED:
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        m_s = o_n[None, :] <= o_m[:, None] + (S - T) if CAUSAL else (o_n < S)[None, :]
        b_p = tl.where(m_s, b_p, 0.0)
    if THRESHOLD:
        b_dp = drop(b_dp, keep_tile(key, i_m, i_n, THRESHOLD, BM, BN, False))
    b_ds = b_p * (b_dp - b_delta[:, None])
    return dot(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_m", "stride_row"])
def dq_kernel(
    q,
    k,
    v,
    o,
    do,
    dq,
    p_lse,
    p_rows_lse,
    p_rows_delta,
    p_key,
    scale,
    H,
    G,
    T,
    S,
    n_m,
    stride_row,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq of one tile of queries; also delta and the lse in base 2 of its rows, which the second pass reads.

    Grid: n_m tiles x batch x heads, the longest rows first.
    """
    BM: tl.constexpr = q.block_shape[2]
    BN: tl.constexpr = k.block_shape[2]
    BD: tl.constexpr = q.block_shape[3]
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    n_bh = tl.num_programs(0) // n_m
    i_m = (n_m - 1 - tl.program_id(0) // n_bh) * BM
    i_bh = tl.program_id(0) % n_bh
    i_b, i_h = i_bh // H, i_bh % H
    i_g = i_h // G

    # (BM,) ds = c p (M dp - delta / c): the constant c leaves the loop, together with scale.
    b_do = load_tile(do, i_b, i_h, i_m)
    b_delta = tl.sum(load_tile(o, i_b, i_h, i_m).to(tl.float32) * b_do.to(tl.float32), 1) / KEEP_SCALE
    o_m = i_m + tl.arange(0, BM)
    b_lse = tl.load(p_lse + i_bh.to(tl.int64) * T + o_m, mask=o_m < T, other=0.0)
    # A row that saw nothing has lse = -inf; exp2(s - +inf) = 0 is what its probabilities have to be.
    b_lse = tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2_E)
    tl.store(p_rows_lse + i_bh.to(tl.int64) * stride_row + o_m, b_lse, mask=o_m < T)
    tl.store(p_rows_delta + i_bh.to(tl.int64) * stride_row + o_m, b_delta, mask=o_m < T)

    key = load_key(p_key, i_b, i_h) if THRESHOLD else None
    b_q = load_tile(q, i_b, i_h, i_m)
    b_dq = tl.zeros([BM, BD], tl.float32)
    if CAUSAL:
        n_full = tl.minimum(tl.maximum(i_m + 1 + S - T, 0), S) // BN * BN
        n_end = tl.minimum(tl.maximum(i_m + BM + S - T, 0), S)
    else:
        n_full = S // BN * BN
        n_end = S
    scale_log2 = scale * LOG2_E
    for i_n in tl.range(0, n_full, BN, num_stages=STAGES):
        b_dq = dq_step(
            b_dq, b_q, b_do, b_lse, b_delta, k, v, key, i_b, i_g, i_m, i_n, scale_log2, T, S,
            CAUSAL, False, THRESHOLD, PRECISION,
        )  # fmt: skip
    for i_n in tl.range(n_full, n_end, BN, num_stages=STAGES):
        b_dq = dq_step(
            b_dq, b_q, b_do, b_lse, b_delta, k, v, key, i_b, i_g, i_m, i_n, scale_log2, T, S,
            CAUSAL, True, THRESHOLD, PRECISION,
        )  # fmt: skip
    store_tile(dq, i_b, i_h, i_m, b_dq * (scale * KEEP_SCALE))


@triton.jit
def dkdv_step(
    b_dk,
    b_dv,
    b_k,
    b_v,
    q,
    do,
    lse,
    delta,
    key,
    i_b,
    i_h,
    i_bh,
    i_m,
    i_n,
    scale_log2,
    T,
    S,
    MASKED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys and values at i_n collect their gradients from queries at i_m."""
    BM: tl.constexpr = q.block_shape[2]
    BN: tl.constexpr = b_k.shape[0]
    b_q = load_tile(q, i_b, i_h, i_m)
    b_do = load_tile(do, i_b, i_h, i_m)
    b_lse = load_row(lse, i_bh, i_m)
    b_delta = load_row(delta, i_bh, i_m)

    # (BN, BM): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    b_s = dot(b_k, b_q.T, None, PRECISION)
    b_dp = dot(b_v, b_do.T, None, PRECISION)
    b_p = tl.exp2(b_s * scale_log2 - b_lse[None, :])
    if MASKED:
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        b_p = tl.where(o_n[:, None] <= o_m[None, :] + (S - T), b_p, 0.0)
    b_p_kept = b_p.to(b_q.dtype)
    if THRESHOLD:
        b_keep = keep_tile(key, i_m, i_n, THRESHOLD, BM, BN, True)
        b_p_kept = drop(b_p_kept, b_keep)
        b_dp = drop(b_dp, b_keep)
    b_dv = dot(b_p_kept, b_do, b_dv, PRECISION)
    b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = dot(b_ds.to(b_q.dtype), b_q, b_dk, PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_n"])
def dkdv_kernel(
    q,
    k,
    v,
    do,
    dk,
    dv,
    lse,
    delta,
    p_key,
    scale,
    H,
    G,
    T,
    S,
    n_n,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and dv of one tile of keys, summed over the G query heads that share it.

    Grid: n_n tiles x batch x key/value heads, the keys seen by most queries first.
    """
    BM: tl.constexpr = q.block_shape[2]
    BN: tl.constexpr = k.block_shape[2]
    BD: tl.constexpr = q.block_shape[3]
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    n_bg = tl.num_programs(0) // n_n
    i_n = tl.program_id(0) // n_bg * BN
    i_bg = tl.program_id(0) % n_bg
    i_b, i_g = i_bg // (H // G), i_bg % (H // G)

    b_k = load_tile(k, i_b, i_g, i_n)
    b_v = load_tile(v, i_b, i_g, i_n)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    # Query tiles cut by the diagonal, then those that see every key of this tile. Beyond the last query, q and do read
    # as zeros and add nothing.
    if CAUSAL:
        m_start = tl.maximum(i_n + T - S, 0) // BM * BM
        m_full = tl.minimum(tl.cdiv(tl.maximum(i_n + BN - 1 + T - S, 0), BM) * BM, tl.cdiv(T, BM) * BM)
    else:
        m_start = 0
        m_full = 0
    scale_log2 = scale * LOG2_E
    for i_h in range(i_g * G, i_g * G + G):
        key = load_key(p_key, i_b, i_h) if THRESHOLD else None
        i_bh = i_b * H + i_h
        for i_m in tl.range(m_start, m_full, BM, num_stages=STAGES):
            b_dk, b_dv = dkdv_step(
                b_dk, b_dv, b_k, b_v, q, do, lse, delta, key, i_b, i_h, i_bh, i_m, i_n, scale_log2, T, S,
                True, THRESHOLD, PRECISION,
            )  # fmt: skip
        for i_m in tl.range(m_full, T, BM, num_stages=STAGES):
            b_dk, b_dv = dkdv_step(
                b_dk, b_dv, b_k, b_v, q, do, lse, delta, key, i_b, i_h, i_bh, i_m, i_n, scale_log2, T, S,
                False, THRESHOLD, PRECISION,
            )  # fmt: skip
    store_tile(dv, i_b, i_g, i_n, b_dv * KEEP_SCALE)
    store_tile(dk, i_b, i_g, i_n, b_dk * (scale * KEEP_SCALE))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor | None,
    causal: bool,
    scale: float,
    threshold: int,
    tf32: bool,
    dq_blocks: Blocks,
    dkdv_blocks: Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """do and out like q (B, H, T, D), lse (B, H, T) -> dq, dk, dv like q, k, v."""
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    do = addressable(do)
    # (2, B * H, T): lse in base 2 and delta, in rows that start at multiples of 16 bytes.
    rows = torch.empty(2, B * H, triton.cdiv(T, 4) * 4, dtype=torch.float32, device=q.device)
    stride_row = rows.stride(1)
    n_m, n_n = triton.cdiv(T, dq_blocks.q), triton.cdiv(S, dkdv_blocks.k)
    meta = {"CAUSAL": causal, "THRESHOLD": threshold, "PRECISION": INPUT_PRECISION[tf32]}

    b = dq_blocks
    dq_kernel[(n_m * B * H,)](
        descriptor(q, b.q),
        descriptor(k, b.k),
        descriptor(v, b.k),
        descriptor(out, b.q),
        descriptor(do, b.q),
        descriptor(dq, b.q),
        lse,
        rows[0],
        rows[1],
        key,
        scale,
        H,
        H // H_kv,
        T,
        S,
        n_m,
        stride_row,
        **meta,
        STAGES=b.stages,
        num_warps=b.warps,
        num_stages=b.stages,
    )
    b = dkdv_blocks
    dkdv_kernel[(n_n * B * H_kv,)](
        descriptor(q, b.q),
        descriptor(k, b.k),
        descriptor(v, b.k),
        descriptor(do, b.q),
        descriptor(dk, b.k),
        descriptor(dv, b.k),
        TensorDescriptor(rows[0], [B * H, T], [stride_row, 1], [1, b.q]),
        TensorDescriptor(rows[1], [B * H, T], [stride_row, 1], [1, b.q]),
        key,
        scale,
        H,
        H // H_kv,
        T,
        S,
        n_n,
        **meta,
        STAGES=b.stages,
        num_warps=b.warps,
        num_stages=b.stages,
    )
    return dq, dk, dv
