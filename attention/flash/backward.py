"""The backward kernels: FlashAttention-2's algorithm 2 (Dao 2023), in two passes that share no accumulator.

The probabilities are recomputed from the log-sum-exp, and dropout's mask M is drawn again. With c the inverse of the
keep probability, ~p = c M p the weights that met v, and delta = rowsum(do * o):

    dv = ~p^T do        dp = do v^T        ds = p (c M dp - delta)        dq = scale ds k        dk = scale ds^T q

`dq_kernel` gives a tile of queries to each program, `dkdv_kernel` a tile of keys: no atomics, so gradients are bitwise
reproducible and need no workspace of their own size. Computing s and dp twice is what that costs.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention.dropout.kernel import drop, keep_tile, load_key
from attention.flash.configs import Blocks, KernelConfigs, Options
from attention.flash.forward import LOG2_E
from attention.flash.score import Lengths, seeing_queries, seen_keys
from attention.flash.tiles import (
    ROW_ALIGNMENT,
    addressable,
    compile_options,
    dot,
    head_group_size,
    kernel_mode,
    load_row,
    load_tile,
    row_tiles,
    rows_like,
    store_tile,
    swizzle_program_id,
    tiles,
)


class Queries(NamedTuple):
    """One query head of what the backward reads row by row."""

    q: Any
    do: Any
    lse2: Any
    delta: Any
    i_b: Any
    i_h: Any
    i_bh: Any


class Keys(NamedTuple):
    """One head of the keys and values."""

    k: Any
    v: Any
    i_b: Any
    i_kv: Any


class Scores(NamedTuple):
    """What makes weights of q k^T: the scale times log2(e), the lengths, and the counters of the head's dropout."""

    scale_log2: Any
    lengths: Any
    key: Any


@triton.jit
def dq_step(b_dq, b_rows, keys, i_m, i_n, scores, MASKED: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """Queries at i_m, b_rows of q, do, lse2 and delta, collect their gradient from keys and values at i_n."""
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    b_q, b_do, b_lse2, b_delta = b_rows
    b_k = load_tile(keys.k, keys.i_b, keys.i_kv, i_n, BN, BD)
    b_v = load_tile(keys.v, keys.i_b, keys.i_kv, i_n, BN, BD)

    # (BM, BN)
    b_s = dot(b_q, b_k.T, None, MODE)
    b_dp = dot(b_do, b_v.T, None, MODE)
    b_p = tl.exp2(b_s * scores.scale_log2 - b_lse2[:, None])
    if MASKED:
        T, S = scores.lengths
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        m_s = o_n[None, :] <= o_m[:, None] + (S - T) if MODE.causal else (o_n < S)[None, :]
        b_p = tl.where(m_s, b_p, 0.0)
    if THRESHOLD:
        b_dp = drop(b_dp, keep_tile(scores.key, i_m, i_n, THRESHOLD, BM, BN, False))
    b_ds = b_p * (b_dp - b_delta[:, None])
    return dot(b_ds.to(b_k.dtype), b_k, b_dq, MODE)


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_m", "n_together"])
def dq_kernel(
    q, k, v, out, do, dq, p_lse2, p_delta, p_key, scale, scale_log2, H, G, T, S, n_m, n_together,
    BLOCKS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries; also delta of its rows, which the second pass reads.

    Grid: n_m tiles x batch x heads, the longest rows first.
    """
    BM: tl.constexpr = BLOCKS.q
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    STAGES: tl.constexpr = BLOCKS.stages
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    i_tile, i_bh = swizzle_program_id(n_m, n_together)
    i_m = (n_m - 1 - i_tile) * BM
    i_b, i_h = i_bh // H, i_bh % H
    i_kv = i_h // G

    # (BM,) ds = c p (M dp - delta / c): the constant c leaves the loop, together with scale.
    b_do = load_tile(do, i_b, i_h, i_m, BM, BD)
    b_delta = tl.sum(load_tile(out, i_b, i_h, i_m, BM, BD).to(tl.float32) * b_do.to(tl.float32), 1) / KEEP_SCALE
    o_m = i_m + tl.arange(0, BM)
    o_row = i_bh.to(tl.int64) * tl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT + o_m
    b_lse2 = tl.load(p_lse2 + o_row, mask=o_m < T, other=0.0)
    tl.store(p_delta + o_row, b_delta, mask=o_m < T)

    key = load_key(p_key, i_b, i_h) if THRESHOLD else None
    b_rows = (load_tile(q, i_b, i_h, i_m, BM, BD), b_do, b_lse2, b_delta)
    keys = Keys(k, v, i_b, i_kv)
    scores = Scores(scale_log2, Lengths(T, S), key)
    b_dq = tl.zeros([BM, BD], tl.float32)
    n_full, n_end = seen_keys(i_m, scores.lengths, BLOCKS, MODE)
    for i_n in tl.range(0, n_full, BLOCKS.k, num_stages=STAGES):
        b_dq = dq_step(b_dq, b_rows, keys, i_m, i_n, scores, False, BLOCKS, MODE)
    for i_n in tl.range(n_full, n_end, BLOCKS.k, num_stages=STAGES):
        b_dq = dq_step(b_dq, b_rows, keys, i_m, i_n, scores, True, BLOCKS, MODE)
    store_tile(dq, i_b, i_h, i_m, b_dq * (scale * KEEP_SCALE), BM, BD)


@triton.jit
def dkdv_step(b_dk, b_dv, b_k, b_v, queries, i_m, i_n, scores, MASKED, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """Keys and values at i_n collect their gradients from queries at i_m."""
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    if THRESHOLD:
        b_keep = keep_tile(scores.key, i_m, i_n, THRESHOLD, BM, BN, True)
    b_q = load_tile(queries.q, queries.i_b, queries.i_h, i_m, BM, BD)
    b_do = load_tile(queries.do, queries.i_b, queries.i_h, i_m, BM, BD)

    # (BN, BM): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    b_s = dot(b_k, b_q.T, None, MODE)
    b_lse2 = load_row(queries.lse2, queries.i_bh, i_m, BM)
    b_p = tl.exp2(b_s * scores.scale_log2 - b_lse2[None, :])
    if MASKED:
        T, S = scores.lengths
        o_m = i_m + tl.arange(0, BM)
        o_n = i_n + tl.arange(0, BN)
        b_p = tl.where(o_n[:, None] <= o_m[None, :] + (S - T), b_p, 0.0)
    b_p_kept = b_p.to(b_q.dtype)
    if THRESHOLD:
        b_p_kept = drop(b_p_kept, b_keep)
    b_dv = dot(b_p_kept, b_do, b_dv, MODE)
    b_dp = dot(b_v, b_do.T, None, MODE)
    b_delta = load_row(queries.delta, queries.i_bh, i_m, BM)
    if THRESHOLD:  # noqa: SIM108
        # b_p_kept still holds what dropout kept: the mask need not be applied to dp as well.
        b_ds = b_p_kept.to(tl.float32) * b_dp - b_p * b_delta[None, :]
    else:
        b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = dot(b_ds.to(b_q.dtype), b_q, b_dk, MODE)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["H", "G", "T", "S", "n_n", "n_together"])
def dkdv_kernel(
    q, k, v, do, dk, dv, lse2, delta, p_key, scale, scale_log2, H, G, T, S, n_n, n_together,
    BLOCKS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the G query heads that share it.

    Grid: n_n tiles x batch x key/value heads, the keys seen by most queries first.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    STAGES: tl.constexpr = BLOCKS.stages
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    i_tile, i_bkv = swizzle_program_id(n_n, n_together)
    i_n = i_tile * BN
    i_b, i_kv = i_bkv // (H // G), i_bkv % (H // G)

    b_k = load_tile(k, i_b, i_kv, i_n, BN, BD)
    b_v = load_tile(v, i_b, i_kv, i_n, BN, BD)
    b_dk = tl.zeros([BN, BD], tl.float32)
    b_dv = tl.zeros([BN, BD], tl.float32)
    # Beyond the last query, q and do read as zeros and add nothing.
    m_start, m_full = seeing_queries(i_n, Lengths(T, S), BLOCKS, MODE)
    for i_h in range(i_kv * G, i_kv * G + G):
        key = load_key(p_key, i_b, i_h) if THRESHOLD else None
        queries = Queries(q, do, lse2, delta, i_b, i_h, i_b * H + i_h)
        scores = Scores(scale_log2, Lengths(T, S), key)
        # With dropout a second copy of the loop costs registers that the mask needs; the diagonal then is a branch.
        for i_m in tl.range(m_start, T if THRESHOLD else m_full, BM, num_stages=STAGES):
            masked = i_m < m_full if THRESHOLD else True
            b_dk, b_dv = dkdv_step(b_dk, b_dv, b_k, b_v, queries, i_m, i_n, scores, masked, BLOCKS, MODE)
        if not THRESHOLD:
            for i_m in tl.range(m_full, T, BM, num_stages=STAGES):
                b_dk, b_dv = dkdv_step(b_dk, b_dv, b_k, b_v, queries, i_m, i_n, scores, False, BLOCKS, MODE)
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
    mode = kernel_mode(D, options)
    n_m = triton.cdiv(T, blocks.q)
    dq_kernel[(n_m * B * H,)](
        tiles(q, blocks.q, mode.columns),
        tiles(k, blocks.k, mode.columns),
        tiles(v, blocks.k, mode.columns),
        tiles(out, blocks.q, mode.columns),
        tiles(do, blocks.q, mode.columns),
        tiles(dq, blocks.q, mode.columns),
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
        BLOCKS=blocks,
        MODE=mode,
        **compile_options(blocks),
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
    mode = kernel_mode(D, options)
    H_kv, S = k.shape[1:3]
    n_n = triton.cdiv(S, blocks.k)
    dkdv_kernel[(n_n * B * H_kv,)](
        tiles(q, blocks.q, mode.columns),
        tiles(k, blocks.k, mode.columns),
        tiles(v, blocks.k, mode.columns),
        tiles(do, blocks.q, mode.columns),
        tiles(dk, blocks.k, mode.columns),
        tiles(dv, blocks.k, mode.columns),
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
        BLOCKS=blocks,
        MODE=mode,
        **compile_options(blocks),
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
    configs: KernelConfigs,
) -> None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills the gradients dq, dk, dv, of the shapes of q, k, v."""
    dq, dk, dv = gradients
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return
    do = addressable(do)
    delta = rows_like(q)
    launch_dq(do, q, k, v, out, lse2, delta, dq, key, options, configs.dq)
    launch_dkdv(do, q, k, v, lse2, delta, dk, dv, key, options, configs.dkdv)
