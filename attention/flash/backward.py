"""The backward kernels: FlashAttention-2's algorithm 2 (Dao 2023), in two passes that never share an accum_dtype.

The probabilities are recomputed from the log-sum-exp, and dropout's mask M is drawn again. With c the inverse of the
keep probability, ~p = c M p the weights that met v, and delta = rowsum(do * o):

    dv = ~p^T do        dp = do v^T        ds = p (c M dp - delta)        dq = scale ds k        dk = scale ds^T q

`dq_kernel` gives a tile of queries to each program, `dkdv_kernel` a tile of keys: no atomics, so gradients are bitwise
reproducible and need no workspace of their own size. Computing s and dp twice is what that costs.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.flash.configs import Blocks, KernelConfigs, Options
from attention.flash.forward import LOG2_E
from attention.flash.philox import drop, keep_tile, load_key
from attention.flash.tiles import (
    INPUT_PRECISION,
    ROW_ALIGNMENT,
    addressable,
    block_columns,
    dot,
    head_group_size,
    load_row,
    load_tile,
    row_tiles,
    rows_like,
    seen_keys,
    store_tile,
    swizzle_program_id,
    tiles,
)


@triton.jit
def dq_step(
    b_dq,
    b_q,
    b_do,
    b_lse2,
    b_delta,
    k,
    v,
    key,
    i_b,
    i_kv,
    i_m,
    i_n,
    scale_log2,
    T,
    S,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Queries at i_m collect their gradient from keys and values at i_n."""
    b_k = load_tile(k, i_b, i_kv, i_n, BN, BD)
    b_v = load_tile(v, i_b, i_kv, i_n, BN, BD)

    # (BM, BN)
    b_s = dot(b_q, b_k.T, None, PRECISION)
    b_dp = dot(b_do, b_v.T, None, PRECISION)
    b_p = tl.exp2(b_s * scale_log2 - b_lse2[:, None])
    if MASKED:
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        m_s = o_n[None, :] <= o_m[:, None] + (S - T) if CAUSAL else (o_n < S)[None, :]
        b_p = tl.where(m_s, b_p, 0.0)
    if THRESHOLD:
        b_dp = drop(b_dp, keep_tile(key, i_m, i_n, THRESHOLD, BM, BN, False))
    b_ds = b_p * (b_dp - b_delta[:, None])
    return dot(b_ds.to(b_k.dtype), b_k, b_dq, PRECISION)


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_m", "n_together"])
def dq_kernel(
    q,
    k,
    v,
    o,
    do,
    dq,
    p_lse2,
    p_delta,
    p_key,
    scale,
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
    """dq of one tile of queries; also delta of its rows, which the second pass reads.

    Grid: n_m tiles x batch x heads, the longest rows first.
    """
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    i_tile, i_bh = swizzle_program_id(n_m, n_together)
    i_m = (n_m - 1 - i_tile) * BM
    i_b, i_h = i_bh // H, i_bh % H
    i_kv = i_h // G

    # (BM,) ds = c p (M dp - delta / c): the constant c leaves the loop, together with scale.
    b_do = load_tile(do, i_b, i_h, i_m, BM, BD)
    b_delta = tl.sum(load_tile(o, i_b, i_h, i_m, BM, BD).to(tl.float32) * b_do.to(tl.float32), 1) / KEEP_SCALE
    o_m = i_m + tl.arange(0, BM)
    o_row = i_bh.to(tl.int64) * tl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT + o_m
    b_lse2 = tl.load(p_lse2 + o_row, mask=o_m < T, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=o_m < T)

    key = load_key(p_key, i_b, i_h) if THRESHOLD else None
    b_q = load_tile(q, i_b, i_h, i_m, BM, BD)
    b_dq = tl.zeros([BM, BD], tl.float32)
    n_full, n_end = seen_keys(i_m, T, S, CAUSAL, BM, BN)
    for i_n in tl.range(0, n_full, BN, num_stages=STAGES):
        b_dq = dq_step(
            b_dq, b_q, b_do, b_lse2, b_delta, k, v, key, i_b, i_kv, i_m, i_n, scale_log2, T, S,
            CAUSAL, False, THRESHOLD, PRECISION, BM, BN, BD,
        )  # fmt: skip
    for i_n in tl.range(n_full, n_end, BN, num_stages=STAGES):
        b_dq = dq_step(
            b_dq, b_q, b_do, b_lse2, b_delta, k, v, key, i_b, i_kv, i_m, i_n, scale_log2, T, S,
            CAUSAL, True, THRESHOLD, PRECISION, BM, BN, BD,
        )  # fmt: skip
    store_tile(dq, i_b, i_h, i_m, b_dq * (scale * KEEP_SCALE), BM, BD)


@triton.jit
def dkdv_step(
    b_dk,
    b_dv,
    b_k,
    b_v,
    q,
    do,
    lse2,
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
    MASKED,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Keys and values at i_n collect their gradients from queries at i_m."""
    if THRESHOLD:
        b_keep = keep_tile(key, i_m, i_n, THRESHOLD, BM, BN, True)
    b_q = load_tile(q, i_b, i_h, i_m, BM, BD)
    b_do = load_tile(do, i_b, i_h, i_m, BM, BD)

    # (BN, BM): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    b_s = dot(b_k, b_q.T, None, PRECISION)
    b_lse2 = load_row(lse2, i_bh, i_m, BM)
    b_p = tl.exp2(b_s * scale_log2 - b_lse2[None, :])
    if MASKED:
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        b_p = tl.where(o_n[:, None] <= o_m[None, :] + (S - T), b_p, 0.0)
    b_p_kept = b_p.to(b_q.dtype)
    if THRESHOLD:
        b_p_kept = drop(b_p_kept, b_keep)
    b_dv = dot(b_p_kept, b_do, b_dv, PRECISION)
    b_dp = dot(b_v, b_do.T, None, PRECISION)
    b_delta = load_row(delta, i_bh, i_m, BM)
    if THRESHOLD:  # noqa: SIM108
        # b_p_kept still holds what dropout kept: the mask need not be applied to dp as well.
        b_ds = b_p_kept.to(tl.float32) * b_dp - b_p * b_delta[None, :]
    else:
        b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = dot(b_ds.to(b_q.dtype), b_q, b_dk, PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_n", "n_together"])
def dkdv_kernel(
    q,
    k,
    v,
    do,
    dk,
    dv,
    lse2,
    delta,
    p_key,
    scale,
    scale_log2,
    H,
    G,
    T,
    S,
    n_n,
    n_together,
    CAUSAL: tl.constexpr,
    THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dk and dv of one tile of keys, summed over the G query heads that share it.

    Grid: n_n tiles x batch x key/value heads, the keys seen by most queries first.
    """
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    i_tile, i_bkv = swizzle_program_id(n_n, n_together)
    i_n = i_tile * BN
    i_b, i_kv = i_bkv // (H // G), i_bkv % (H // G)

    b_k = load_tile(k, i_b, i_kv, i_n, BN, BD)
    b_v = load_tile(v, i_b, i_kv, i_n, BN, BD)
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
    for i_h in range(i_kv * G, i_kv * G + G):
        key = load_key(p_key, i_b, i_h) if THRESHOLD else None
        i_bh = i_b * H + i_h
        # With dropout a second copy of the loop costs registers that the mask needs; the diagonal then is a branch.
        for i_m in tl.range(m_start, T if THRESHOLD else m_full, BM, num_stages=STAGES):
            b_dk, b_dv = dkdv_step(
                b_dk, b_dv, b_k, b_v, q, do, lse2, delta, key, i_b, i_h, i_bh, i_m, i_n, scale_log2, T, S,
                i_m < m_full if THRESHOLD else True, THRESHOLD, PRECISION, BM, BN, BD,
            )  # fmt: skip
        if not THRESHOLD:
            for i_m in tl.range(m_full, T, BM, num_stages=STAGES):
                b_dk, b_dv = dkdv_step(
                    b_dk, b_dv, b_k, b_v, q, do, lse2, delta, key, i_b, i_h, i_bh, i_m, i_n, scale_log2, T, S,
                    False, THRESHOLD, PRECISION, BM, BN, BD,
                )  # fmt: skip
    store_tile(dv, i_b, i_kv, i_n, b_dv * KEEP_SCALE, BN, BD)
    store_tile(dk, i_b, i_kv, i_n, b_dk * (scale * KEEP_SCALE), BN, BD)


def launch_dq(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor,
    key: Tensor | None,
    options: Options,
    blocks: Blocks,
) -> None:
    """The first pass: fills dq, which has q's shape, and `delta`."""
    B, H, T, D = q.shape
    BD = block_columns(D)
    n_m = triton.cdiv(T, blocks.q)
    dq_kernel[(n_m * B * H,)](
        tiles(q, blocks.q, BD),
        tiles(k, blocks.k, BD),
        tiles(v, blocks.k, BD),
        tiles(out, blocks.q, BD),
        tiles(do, blocks.q, BD),
        tiles(dq, blocks.q, BD),
        lse2,
        delta,
        key,
        options.scale,
        options.scale * LOG2_E.value,
        H,
        H // k.shape[1],
        T,
        k.shape[2],
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


def launch_dkdv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dk: Tensor,
    dv: Tensor,
    key: Tensor | None,
    options: Options,
    blocks: Blocks,
) -> None:
    """The second pass: fills dk and dv, which have the shape of k."""
    B, H, T, D = q.shape
    BD = block_columns(D)
    H_kv, S = k.shape[1:3]
    n_n = triton.cdiv(S, blocks.k)
    dkdv_kernel[(n_n * B * H_kv,)](
        tiles(q, blocks.q, BD),
        tiles(k, blocks.k, BD),
        tiles(v, blocks.k, BD),
        tiles(do, blocks.q, BD),
        tiles(dk, blocks.k, BD),
        tiles(dv, blocks.k, BD),
        row_tiles(lse2, T, blocks.q),
        row_tiles(delta, T, blocks.q),
        key,
        options.scale,
        options.scale * LOG2_E.value,
        H,
        H // H_kv,
        T,
        S,
        n_n,
        head_group_size(B * H_kv, q[0, : H // H_kv]),
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


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    key: Tensor | None,
    options: Options,
    passes: KernelConfigs,
) -> None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills the gradients dq, dk, dv, of the shapes of q, k, v."""
    dq, dk, dv = gradients
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return
    do = addressable(do)
    delta = rows_like(q)
    launch_dq(do, q, k, v, out, lse2, delta, dq, key, options, passes.dq)
    launch_dkdv(do, q, k, v, lse2, delta, dk, dv, key, options, passes.dkdv)
