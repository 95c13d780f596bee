"""The backward kernels: FlashAttention-2's algorithm 2 (Dao 2023), in two passes that share no accumulator.

The probabilities are recomputed from the log-sum-exp, and dropout's mask M is drawn again. With c the inverse of the
keep probability, ~p = c M p the weights that met v, and delta = rowsum(do * o):

    dv = ~p^T do        dp = do v^T        ds = p (c M dp - delta)        dq = scale ds k        dk = scale ds^T q

`dq_kernel` gives a tile of queries to each program, `dkdv_kernel` a tile of keys: no atomics, so gradients are bitwise
reproducible and need no workspace of their size. In return s and dp are computed twice.

Where tensors of the scores learn from 16 bits, see `Spec.learns`, `dq_kernel` also sums p c M dp along the rows: delta
without the roundings of o and ~p, for all that comes after dq.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dropout.kernel import drop, dropped_tile, load_key
from ..scores.alibi import alibi_bias, alibi_row_bias
from ..scores.sinks import sinks_gradient_of_kernels
from ..scores.soft_cap import soft_cap_tanh, times_derivative
from .call import Blocks, KernelCall, Mode, choose
from .formula import Place, added_by, kernel_inputs, sums_of, written
from .launch import launch
from .score import (
    LOG2_E,
    change_scores,
    key_interval,
    locate,
    log2_factor,
    query_interval,
    seeing_queries,
    seen_keys,
    sees_key,
)
from .tiles import (
    ROW_ALIGNMENT,
    addressable,
    compile_options,
    dot,
    head_bytes,
    head_group_size,
    launch_scalars,
    load_row,
    load_tile,
    mode_of,
    row_tiles,
    rows_like,
    store_tile,
    swizzle_program_id,
    tiles,
)


class QueriesOfHead(NamedTuple):
    """The tensors that the backward reads row by row, for one query head, and the address for its ds, or 0."""

    q: Any
    do: Any
    lse2: Any
    delta: Any
    i_b: Any
    i_h: Any
    i_bh: Any
    p_ds: Any


class KeysOfHead(NamedTuple):
    """One head of the keys and values."""

    k: Any
    v: Any
    i_b: Any
    i_kv: Any


class DqRows(NamedTuple):
    """One number for each query row, for the pass that stores delta."""

    lse2: Any
    delta: Any


class Scores(NamedTuple):
    """The values that turn q k^T into weights, for one head; zero for features that MODE does not have.

    scale_log2, slope2  scale and slope times log2(e)
    formula    a FormulaInputs
    pos        positions
    interval   of the keys that each query of the tile sees, or of the queries that see each key
    key        dropout's counters
    """

    scale_log2: Any
    slope2: Any
    pos: Any
    interval: Any
    key: Any
    formula: Any


class FormulaInputs(NamedTuple):
    """The inputs of a formula, for one head; `vectors` belong to the rows that a program keeps."""

    inputs: Any
    scale: Any
    i_b: Any
    i_h: Any
    head: Any
    vectors: Any


@triton.jit
def load_scores(scalars, pos, interval, inputs, i_b, i_h, o_rows, OF_KEYS: tl.constexpr, MODE: tl.constexpr):
    """The `Scores` of query head i_h of sequence i_b, for a program that keeps the queries, or keys, o_rows."""
    slope2 = tl.load(inputs.slopes + i_h) * LOG2_E if MODE.alibi else 0.0
    key = load_key(inputs.key, i_b, i_h) if MODE.threshold else 0
    formula = 0
    if MODE.formula is not None:
        head = MODE.formula.head(inputs.formula, i_b, i_h)
        if OF_KEYS:
            vectors = MODE.formula.column(inputs.formula, i_b, i_h, 0, o_rows[:, None], None)
        else:
            vectors = MODE.formula.row(inputs.formula, i_b, i_h, o_rows[:, None], pos.T)
        formula = FormulaInputs(inputs.formula, scalars.scale, i_b, i_h, head, vectors)  # type: ignore[assignment]
    return Scores(scalars.scale_log2, slope2, pos, interval, key, formula)


@triton.jit
def dq_step(
    b_totals, b_rows, keys, i_m, i_n, scores, MASKED,
    SUMS_DELTA: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """QueriesOfHead at i_m, of which b_rows has q, do, lse2 and delta, collect from keys and values at i_n.

    b_totals: dq, and p M dp summed along the rows (BM,) if SUMS_DELTA; without the scale of kept weights
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    b_dq, b_sum = b_totals
    b_q, b_do, b_lse2, b_delta = b_rows
    pos, slope2, scale_log2 = scores.pos, scores.slope2, scores.scale_log2
    b_k = load_tile(keys.k, keys.i_b, keys.i_kv, i_n, BN, BD)
    b_v = load_tile(keys.v, keys.i_b, keys.i_kv, i_n, BN, BD)

    # (BM, BN)
    b_s = dot(b_q, b_k.T, None, MODE)
    b_dp = dot(b_do, b_v.T, None, MODE)
    b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
    o_m, o_columns = i_m + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    b_bias = alibi_bias(slope2, o_m[:, None], o_columns, i_n, i_m + pos.offset, pos, MODE) if MODE.alibi else None
    if MODE.formula is not None:
        f = scores.formula
        place = Place(f.i_b, f.i_h, o_m[:, None], (i_n + tl.arange(0, BN))[None, :], pos)
        column = MODE.formula.column(f.inputs, f.i_b, f.i_h, i_n, o_columns, None)
        b_s, b_slope = MODE.formula.slope(b_s, f.scale, f.head, f.vectors, column, f.inputs, place, MODE.exact)
    else:
        b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
    b_p = tl.exp2(b_s * log2_factor(scale_log2, MODE) - b_lse2[:, None])
    if MASKED:
        o_n = (i_n + tl.arange(0, BN))[None, :]
        b_p = tl.where(sees_key(o_m[:, None], o_n, scores.interval, pos, MODE), b_p, 0.0)
    if THRESHOLD:
        b_dp = drop(b_dp, dropped_tile(scores.key, i_m, i_n, THRESHOLD, BM, BN, False))
    if SUMS_DELTA:
        b_sum += tl.sum(b_p * b_dp, 1)
    b_ds = times_derivative(b_p * (b_dp - b_delta[:, None]), b_tanh, MODE)
    if MODE.formula is not None and MODE.formula.has_slope:
        b_ds = b_ds * b_slope
        if MASKED:  # a derivative may have no value where a query does not see a key
            o_n = (i_n + tl.arange(0, BN))[None, :]
            b_ds = tl.where(sees_key(o_m[:, None], o_n, scores.interval, pos, MODE), b_ds, 0.0)
    return dot(b_ds.to(b_k.dtype), b_k, b_dq, MODE), b_sum


@triton.jit
def dq_kernel(
    q, k, v, out, do, dq, rows, inputs, scalars,
    SUMS_DELTA: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries; also delta of its rows, which the second pass reads: with SUMS_DELTA summed up.

    Grid: tiles x batch x heads, the longest rows first.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    STAGES: tl.constexpr = BLOCKS.stages
    KEEP_SCALE: tl.constexpr = 256 / (256 - MODE.threshold)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    n_m = tl.cdiv(T, BM)
    i_tile, i_bh = swizzle_program_id(n_m, scalars)
    i_m = (n_m - 1 - i_tile) * BM
    i_b, i_h = i_bh // H, i_bh % H
    i_kv = i_h // (H // H_kv)

    # (BM,) ds = c p (M dp - delta / c): the constant c leaves the loop, together with scale.
    b_do = load_tile(do, i_b, i_h, i_m, BM, BD)
    b_delta = tl.sum(load_tile(out, i_b, i_h, i_m, BM, BD).to(tl.float32) * b_do.to(tl.float32), 1) / KEEP_SCALE
    o_m = i_m + tl.arange(0, BM)
    o_row = i_bh.to(tl.int64) * tl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT + o_m
    b_lse2 = tl.load(rows.lse2 + o_row, mask=o_m < T, other=0.0)
    if not SUMS_DELTA:
        tl.store(rows.delta + o_row, b_delta, mask=o_m < T)

    pos = locate(T, S, inputs, scalars, i_b, i_bh, 1)
    interval = key_interval(o_m, pos, MODE) if MODE.bounded or MODE.offsets else 0
    scores = load_scores(scalars, pos, interval, inputs, i_b, i_h, o_m, False, MODE)
    if MODE.alibi:
        b_lse2 += alibi_row_bias(scores.slope2, o_m, i_m + pos.offset, pos, MODE)
    b_rows = (load_tile(q, i_b, i_h, i_m, BM, BD), b_do, b_lse2, b_delta)
    keys = KeysOfHead(k, v, i_b, i_kv)
    b_totals = tl.zeros([BM, BD], tl.float32), tl.zeros([BM], tl.float32)
    n_start, n_full_start, n_full_end, n_end = seen_keys(i_m, pos, BLOCKS, MODE)
    if MODE.bounded:
        for i_n in tl.range(n_start, n_end, BN, num_stages=STAGES):
            masked = (i_n < n_full_start) | (i_n >= n_full_end)
            b_totals = dq_step(b_totals, b_rows, keys, i_m, i_n, scores, masked, SUMS_DELTA, BLOCKS, MODE)
    else:
        for i_n in tl.range(n_start, n_full_end, BN, num_stages=STAGES):
            b_totals = dq_step(b_totals, b_rows, keys, i_m, i_n, scores, False, SUMS_DELTA, BLOCKS, MODE)
        for i_n in tl.range(n_full_end, n_end, BN, num_stages=STAGES):
            b_totals = dq_step(b_totals, b_rows, keys, i_m, i_n, scores, True, SUMS_DELTA, BLOCKS, MODE)
    b_dq, b_sum = b_totals
    if SUMS_DELTA:
        tl.store(rows.delta + o_row, b_sum, mask=o_m < T)
    store_tile(dq, i_b, i_h, i_m, b_dq * (scalars.scale * KEEP_SCALE), BM, BD)


@triton.jit
def weights_of_keys(b_s, b_tanh, b_lse2, o_m, o_n, i_n, scores, MASKED, MODE: tl.constexpr):
    """(weights, derivative of the scores by s where a formula has one), (BN, BM), of q k^T transposed."""
    pos, slope2 = scores.pos, scores.slope2
    o_rows = tl.arange(0, o_n.shape[0])[:, None]
    b_bias = alibi_bias(slope2, o_m[None, :], o_rows, i_n, i_n, pos, MODE) if MODE.alibi else None
    b_slope = 1.0
    if MODE.alibi:
        b_lse2 += alibi_row_bias(slope2, o_m, i_n, pos, MODE)
    if MODE.formula is not None:
        f = scores.formula
        place = Place(f.i_b, f.i_h, o_m[None, :], o_n[:, None], pos)
        row = MODE.formula.row(f.inputs, f.i_b, f.i_h, place.o_m, pos.T)
        b_s, b_slope = MODE.formula.slope(b_s, f.scale, f.head, row, f.vectors, f.inputs, place, MODE.exact)
        b_lse2 = tl.where(o_m < pos.T, b_lse2, float("inf"))  # beyond the end, scores may be anything
    else:
        b_s = change_scores(b_s, b_tanh, b_bias, scores.scale_log2, MODE)
    b_p = tl.exp2(b_s * log2_factor(scores.scale_log2, MODE) - b_lse2[None, :])
    if MASKED:
        if MODE.bounded or MODE.offsets:
            first, end = scores.interval
            b_p = tl.where((o_m[None, :] >= first[:, None]) & (o_m[None, :] < end[:, None]), b_p, 0.0)
        else:
            b_p = tl.where(o_n[:, None] <= o_m[None, :] + pos.offset, b_p, 0.0)
    if MODE.formula is not None and MODE.formula.has_slope:
        b_slope = tl.where(b_p > 0, b_slope, 0.0)  # it may have no value where a query does not see a key
    return b_p, b_slope


@triton.jit
def dkdv_step(
    b_totals, b_kv, queries, i_m, i_n, scores, MASKED, TARGETS: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """KeysOfHead and values at i_n collect their gradients from queries at i_m.

    b_totals: dk, dv, and the sums (BN,) where TARGETS has some; without the scale of kept weights
    TARGETS: a WrittenTargets
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    pos = scores.pos
    b_dk, b_dv, b_sum = b_totals
    b_k, b_v = b_kv
    if THRESHOLD:
        b_drop = dropped_tile(scores.key, i_m, i_n, THRESHOLD, BM, BN, True)
    b_q = load_tile(queries.q, queries.i_b, queries.i_h, i_m, BM, BD)
    b_do = load_tile(queries.do, queries.i_b, queries.i_h, i_m, BM, BD)

    # (BN, BM): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    b_s = dot(b_k, b_q.T, None, MODE)
    b_lse2 = load_row(queries.lse2, queries.i_bh, i_m, BM)
    o_m, o_n = i_m + tl.arange(0, BM), i_n + tl.arange(0, BN)
    b_tanh = soft_cap_tanh(b_s, scores.scale_log2, MODE) if MODE.soft_cap is not None else None
    b_p, b_slope = weights_of_keys(b_s, b_tanh, b_lse2, o_m, o_n, i_n, scores, MASKED, MODE)
    b_p_kept = b_p.to(b_q.dtype)
    if THRESHOLD:
        b_p_kept = drop(b_p_kept, b_drop)
    b_dv = dot(b_p_kept, b_do, b_dv, MODE)
    b_dp = dot(b_v, b_do.T, None, MODE)
    b_delta = load_row(queries.delta, queries.i_bh, i_m, BM)
    if THRESHOLD:
        # b_p_kept still holds the weights that dropout kept: the mask need not be applied to dp as well.
        b_ds = times_derivative(b_p_kept.to(tl.float32) * b_dp - b_p * b_delta[None, :], b_tanh, MODE)
        if MODE.formula is not None and MODE.formula.has_slope:
            b_ds = b_ds * b_slope
    else:
        # The derivative meets p and not ds, so that tanh leaves the registers before dp arrives.
        b_p = times_derivative(b_p, b_tanh, MODE)
        if MODE.formula is not None and MODE.formula.has_slope:
            b_p = b_p * b_slope
        b_ds = b_p * (b_dp - b_delta[None, :])
    b_dk = dot(b_ds.to(b_q.dtype), b_q, b_dk, MODE)
    if TARGETS.sums:
        b_sum += tl.sum(weighted(b_ds, o_m[None, :] + pos.offset - o_n[:, None], scores, TARGETS), 1)
    if TARGETS.ds:
        KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
        p_ds = queries.p_ds + o_m.to(tl.int64)[None, :] * pos.S + o_n[:, None]
        tl.store(p_ds, b_ds * KEEP_SCALE, mask=(o_m < pos.T)[None, :] & (o_n < pos.S)[:, None])
    return b_dk, b_dv, b_sum


@triton.jit
def weighted(b_ds, distance, scores, TARGETS: tl.constexpr):
    """What is summed of ds."""
    b_x = b_ds
    if TARGETS.far is not None:
        NUMBER: tl.constexpr = TARGETS.far
        b_x = tl.where(is_far(scores.formula.inputs[NUMBER], distance), b_ds, 0.0)
    elif TARGETS.times_distance:
        b_x = b_ds * distance.to(tl.float32)
    return b_x


class WrittenTargets(NamedTuple):
    """What `dkdv_kernel` writes of Targets.

    sums            whether there are sums of ds along the columns
    far             the number of the input whose furthest pairs alone are summed; None: all are
    times_distance  whether they are summed times i - j
    ds              whether ds is written
    """

    sums: bool
    far: int | None
    times_distance: bool
    ds: bool


@triton.jit
def dkdv_kernel(
    q, k, v, do, dk, dv, lse2, delta, targets, inputs, scalars,
    TARGETS: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the G query heads that share it, and Targets of each of these heads.

    Grid: tiles x batch x key/value heads, the keys seen by most queries first.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    STAGES: tl.constexpr = BLOCKS.stages
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    G = H // H_kv
    i_tile, i_bkv = swizzle_program_id(tl.cdiv(S, BN), scalars)
    i_n = i_tile * BN
    i_b, i_kv = i_bkv // H_kv, i_bkv % H_kv

    b_kv = load_tile(k, i_b, i_kv, i_n, BN, BD), load_tile(v, i_b, i_kv, i_n, BN, BD)
    b_dk, b_dv = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    pos = locate(T, S, inputs, scalars, i_b, i_bkv * G, G)
    interval = query_interval(i_n + tl.arange(0, BN), pos, MODE) if MODE.bounded or MODE.offsets else 0
    # Beyond the last query, q and do read as zeros and add nothing.
    m_start, m_full_start, m_full_end, m_end = seeing_queries(i_n, pos, BLOCKS, MODE)
    for i_h in range(i_kv * G, i_kv * G + G):
        scores = load_scores(scalars, pos, interval, inputs, i_b, i_h, i_n + tl.arange(0, BN), True, MODE)
        p_ds = 0
        if TARGETS.ds:
            p_ds = targets.ds + tl.cast(i_b * H + i_h, tl.int64) * T * S
        queries = QueriesOfHead(q, do, lse2, delta, i_b, i_h, i_b * H + i_h, p_ds)
        b_totals = b_dk, b_dv, tl.zeros([BN], tl.float32)
        # One loop with a branch for tiles that need a mask, or one loop for those and one for the others. With dropout
        # a second copy of the loop costs registers that the mask needs.
        if MODE.bounded or THRESHOLD:
            for i_m in tl.range(m_start, m_end, BM, num_stages=STAGES):
                masked = (i_m < m_full_start) | (i_m + BM > m_full_end) if MODE.bounded else i_m < m_full_start
                b_totals = dkdv_step(b_totals, b_kv, queries, i_m, i_n, scores, masked, TARGETS, BLOCKS, MODE)
        else:
            for i_m in tl.range(m_start, m_full_start, BM, num_stages=STAGES):
                b_totals = dkdv_step(b_totals, b_kv, queries, i_m, i_n, scores, True, TARGETS, BLOCKS, MODE)
            for i_m in tl.range(m_full_start, m_end, BM, num_stages=STAGES):
                b_totals = dkdv_step(b_totals, b_kv, queries, i_m, i_n, scores, False, TARGETS, BLOCKS, MODE)
        b_dk, b_dv, b_sum = b_totals
        if TARGETS.sums:
            o_n = i_n + tl.arange(0, BN)
            o_sum = tl.cast(i_b * H + i_h, tl.int64) * S + o_n
            tl.store(targets.sums + o_sum, b_sum * KEEP_SCALE, mask=o_n < S)
    store_tile(dv, i_b, i_kv, i_n, b_dv * KEEP_SCALE, BN, BD)
    store_tile(dk, i_b, i_kv, i_n, b_dk * (scalars.scale * KEEP_SCALE), BN, BD)


class Gradients(NamedTuple):
    """The results of a backward: dq, dk and dv, of the shapes of q, k and v.

    sums   (B, H, S) fp32, filled with zeros: for each key the sum over the queries that `sums_of` names; None if it is
           not needed
    ds     (B, H, T, S) fp32, None if it is not needed
    delta  as `rows_like`, without the scale that dropout gives kept weights; None if it is not needed
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    sums: Tensor | None = None
    ds: Tensor | None = None
    delta: Tensor | None = None


class Tensors(NamedTuple):
    """The tensors of a backward pass, as in `backward` and `Gradients`; lse2 and delta as in `rows_like`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    do: Tensor
    lse2: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    sums: Tensor | None = None
    ds: Tensor | None = None


def launch_dq(x: Tensors, call: KernelCall, blocks: Blocks) -> None:
    """The first pass: fills dq and delta."""
    (B, H, T, _), mode = x.q.shape, mode_of(call, x.q)
    launch(
        dq_kernel,
        ((T + blocks.q - 1) // blocks.q * B * H,),
        tiles(x.q, blocks.q, mode.columns),
        tiles(x.k, blocks.k, mode.columns),
        tiles(x.v, blocks.k, mode.columns),
        tiles(x.out, blocks.q, mode.columns),
        tiles(x.do, blocks.q, mode.columns),
        tiles(x.dq, blocks.q, mode.columns),
        DqRows(x.lse2, x.delta),
        kernel_inputs(call, T, x.k.shape[2]),
        launch_scalars(call, head_group_size(B * H, head_bytes(x.k), H // x.k.shape[1])),
        SUMS_DELTA=call.spec.learns and x.q.element_size() == 2,
        BLOCKS=blocks,
        MODE=mode,
        **compile_options(blocks),
    )


def launch_dkdv(x: Tensors, call: KernelCall, blocks: Blocks) -> None:
    """The second pass: fills dk and dv."""
    (B, H, T, _), mode = x.q.shape, mode_of(call, x.q)
    H_kv, S = x.k.shape[1:3]
    sums = sums_of(call.spec)
    far = written(call.spec.score).added if sums == "far" else None
    if x.ds is not None:
        fill_unseen(x.ds, call, blocks.q, blocks.k, mode)
    launch(
        dkdv_kernel,
        ((S + blocks.k - 1) // blocks.k * B * H_kv,),
        tiles(x.q, blocks.q, mode.columns),
        tiles(x.k, blocks.k, mode.columns),
        tiles(x.v, blocks.k, mode.columns),
        tiles(x.do, blocks.q, mode.columns),
        tiles(x.dk, blocks.k, mode.columns),
        tiles(x.dv, blocks.k, mode.columns),
        row_tiles(x.lse2, T, blocks.q),
        row_tiles(x.delta, T, blocks.q),
        Targets(x.sums, x.ds),
        kernel_inputs(call, T, x.k.shape[2]),
        launch_scalars(call, head_group_size(B * H_kv, H // H_kv * head_bytes(x.q))),
        TARGETS=WrittenTargets(sums is not None, far, sums == "distance", x.ds is not None),
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
    gradients: Gradients,
    call: KernelCall,
) -> Tensor | None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills the gradients.

    Returns the gradient of the sinks (H,), or None where there are none.
    """
    sinks, configs = call.inputs.sinks, choose(call.problem(q, k))
    dq, dk, dv, sums, ds, delta = gradients
    delta = rows_like(q) if delta is None else delta
    x = Tensors(q, k, v, out, addressable(do), lse2, delta, dq, dk, dv, sums, ds)
    launch_dq(x, call, configs.dq)
    launch_dkdv(x, call, configs.dkdv)
    return None if sinks is None else sinks_gradient_of_kernels(sinks, lse2, x.delta, q.shape[2], call.spec.threshold)


MOST = 2**30  # the most elements of ds that are written where fewer values are learned


class Targets(NamedTuple):
    """The parts of ds that a backward writes if they are needed.

    sums  (B, H, S): along the columns, as `sums_of` in formula.py says
    ds    (B, H, T, S)
    """

    sums: Any
    ds: Any


@triton.jit
def is_far(x, distance):
    """Whether pairs of a distance share the number of the furthest; x is a
    Distances."""
    return distance - (x.lowest >> 2) >= (x.size >> 2) - 1


def slopes_gradient(sums: Tensor) -> Tensor:
    """The gradient of ALiBi's slopes (H,), of the sums of ds (i - j)."""
    return -sums.sum((0, 2), dtype=torch.float64).float()


@triton.jit
def unseen_kernel(ds, T, S, H, inputs, scalars, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """Zeros in ds (B, H, T, S) for the query tiles that a tile of keys' program does not visit. Grid: tiles, B x H."""
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    i_n, i_bh = tl.program_id(0) * BN, tl.program_id(1)
    pos = locate(T, S, inputs, scalars, i_bh // H, i_bh, 1)
    start, _, _, end = seeing_queries(i_n, pos, BLOCKS, MODE)
    start = tl.minimum(start, tl.cdiv(T, BM) * BM)
    end = tl.maximum(tl.cdiv(tl.maximum(end, 0), BM) * BM, start)
    o_m, o_n = tl.arange(0, BM)[:, None], (i_n + tl.arange(0, BN))[None, :]
    zeros = tl.zeros([BM, BN], tl.float32)
    p_ds = ds + tl.cast(i_bh, tl.int64) * T * S
    for i_m in range(0, start, BM):
        tl.store(p_ds + (i_m + o_m).to(tl.int64) * S + o_n, zeros, mask=(i_m + o_m < T) & (o_n < S))
    for i_m in range(end, T, BM):
        tl.store(p_ds + (i_m + o_m).to(tl.int64) * S + o_n, zeros, mask=(i_m + o_m < T) & (o_n < S))


def fill_unseen(ds: Tensor, call: KernelCall, rows: int, keys: int, mode: Mode) -> None:
    """Write the zeros of ds, of which the backward writes tiles of so many queries and keys."""
    B, H, T, S = ds.shape
    launch(
        unseen_kernel,
        (triton.cdiv(S, keys), B * H),
        ds,
        T,
        S,
        H,
        kernel_inputs(call, T, S)._replace(formula=None),
        launch_scalars(call, 1),
        BLOCKS=Blocks(rows, keys, 8, 1),
        MODE=mode,
        num_warps=8,
        enable_fp_fusion=True,
    )


def room_for_ds(call: KernelCall, q: Tensor, k: Tensor) -> Tensor | None:
    """Room for ds where the backward writes it: if a learned tensor's gradient is ds, or is not much smaller."""
    score, shape = call.spec.score, (*q.shape[:3], k.shape[2])
    number = written(score).added if added_by(score) == "pair" else None
    if number not in call.spec.learned or math.prod(shape) > max(MOST, call.inputs.formula[number].numel()):
        return None
    return torch.empty(shape, dtype=torch.float32, device=q.device)
