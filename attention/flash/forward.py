"""The forward kernel: FlashAttention-2's algorithm 1 (Dao 2023), one tile of queries for each program.

A program keeps a tile of queries, walks over the tiles of keys and values that it sees, and carries the running maximum
m, the running sum l and the unnormalised output o of each row. Nothing of size T x S leaves the chip.

    s = q k^T          m' = max(m, rowmax(scale s))       p = exp(scale s - m')
    l = l exp(m - m') + rowsum(p)                         o = o exp(m - m') + dropout(p) v
    out = o / l        lse = m + log(l)

Where a soft cap keeps exp(s) from overflowing, m is the first tile's maximum: nothing is ever rescaled.
Base 2 is the hardware's: the kernel carries m and the scale times log2(e), and exp2 stands for exp.

With attention.precision=fp8 both products are in e4m3, with a scale for each head of q, k and v, and 448 for weights.

A formula's factors of s that are the same along a row multiply the queries, before any score is computed. The Hopper
forward multiplies each tile of queries in shared memory, see hopper/forward.py. Others have the queries multiplied in a
separate pass, and so has every backward, whose tiles of queries are read many times. The product is rounded to the
queries' precision, the same everywhere.

    q' = A q        dq = A dq'        dA = rowsum(dq' q)
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..dropout.kernel import drop, dropped_tile, load_key
from ..gpu import INTERPRET
from ..scores.alibi import alibi_bias, alibi_row_bias
from ..scores.soft_cap import LEAST_MAXIMUM, soft_cap_tanh
from .call import Blocks, KernelCall, choose
from .formula import Place, kernel_inputs
from .launch import launch
from .score import LOG2_E, change_scores, key_interval, locate, log2_factor, seen_keys, sees_key
from .tiles import (
    Rows,
    compile_options,
    dot,
    head_bytes,
    head_group_size,
    launch_scalars,
    load_tile,
    mode_of,
    rows_like,
    store_lse,
    store_tile,
    swizzle_program_id,
    tiles,
    unspecialised,
)

LARGEST = tl.constexpr(448.0)  # of e4m3


def in_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, H, T, D) as e4m3 values, D a multiple of 16 bytes, and the scale of each head that gives x back (B, H)."""
    x = F.pad(x.float(), (0, -x.shape[-1] % 16))
    scales = (x.abs().amax((2, 3), keepdim=True) / LARGEST.value).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scales).to(torch.float8_e4m3fn), scales.flatten(1)


@triton.jit
def weights_in_8_bits(b_p):
    """Weights up to 1, times LARGEST, in e4m3."""
    b_p = b_p * LARGEST
    if INTERPRET:  # whose rounding loses the carry of the last bit, and so has to find nothing to round
        b_bits = b_p.to(tl.int32, bitcast=True)
        b_bits += 0x7FFFF + ((b_bits >> 20) & 1)
        b_p = (b_bits & -0x100000).to(tl.float32, bitcast=True)
    return b_p.to(tl.float8e4nv)


@triton.jit
def forward_kernel(q, k, v, out, rows, scales, inputs, scalars, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """out and `rows`, lse and lse2, of one tile of queries. Grid: tiles x batch x heads, the longest rows first.

    scales  (B, H, 2) fp32: those of the scores and of the values of each head, where products are in 8 bits; else None
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    BD: tl.constexpr = MODE.columns
    THRESHOLD: tl.constexpr = MODE.threshold
    STAGES: tl.constexpr = BLOCKS.stages
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    n_m = tl.cdiv(T, BM)
    i_tile, i_bh = swizzle_program_id(n_m, scalars)
    i_m = (n_m - 1 - i_tile) * BM
    i_b, i_h = i_bh // H, i_bh % H
    i_kv = i_h // (H // H_kv)

    key = load_key(inputs.key, i_b, i_h) if THRESHOLD else None
    b_q = load_tile(q, i_b, i_h, i_m, BM, BD)
    o = tl.zeros([BM, BD], tl.float32)
    m = tl.full([BM], LEAST_MAXIMUM if MODE.fixed_max else -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)

    pos = locate(T, S, inputs, scalars, i_b, i_bh, 1)
    n_start, n_full_start, n_full_end, n_end = seen_keys(i_m, pos, BLOCKS, MODE)
    o_m = i_m + tl.arange(0, BM)
    interval = key_interval(o_m, pos, MODE) if MODE.bounded or MODE.offsets else (0, 0)
    if MODE.alibi:
        slope2, i_reference = tl.load(inputs.slopes + i_h) * LOG2_E, i_m + pos.offset
        b_row_bias = alibi_row_bias(slope2, o_m, i_reference, pos, MODE)
    if MODE.sinks:  # as if a key without a value had been seen before all others
        m = tl.zeros([BM], tl.float32) + tl.load(inputs.sinks + i_h) * LOG2_E
        l = tl.full([BM], 1.0, tl.float32)
        if MODE.alibi:
            m += b_row_bias
    if MODE.formula is not None:
        head = MODE.formula.head(inputs.formula, i_b, i_h)
        row = MODE.formula.row(inputs.formula, i_b, i_h, o_m[:, None], T)
    scale_log2 = scalars.scale_log2
    if scales is not None:
        scale_log2 *= tl.load(scales + 2 * i_bh)
    factor = log2_factor(scale_log2, MODE)
    for i_n in tl.range(n_start, n_end, BN, num_stages=STAGES):
        # Drawn before the scores, while the previous tile's product with v is still in flight.
        b_drop = dropped_tile(key, i_m, i_n, THRESHOLD, BM, BN, False) if THRESHOLD else None
        # (BM, BN)
        b_k = load_tile(k, i_b, i_kv, i_n, BN, BD)
        b_s = dot(b_q, b_k.T, None, MODE)
        b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
        o_columns = tl.arange(0, BN)[None, :]
        b_bias = alibi_bias(slope2, o_m[:, None], o_columns, i_n, i_reference, pos, MODE) if MODE.alibi else None
        if MODE.formula is not None:
            place = Place(i_b, i_h, o_m[:, None], (i_n + tl.arange(0, BN))[None, :], pos)
            column = MODE.formula.column(inputs.formula, i_b, i_h, i_n, o_columns, None)
            b_s = MODE.formula.value(b_s, scalars.scale, head, row, column, inputs.formula, place, MODE.exact)
        else:
            b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
        if (i_n < n_full_start) | (i_n >= n_full_end) if MODE.bounded else i_n >= n_full_end:
            o_n = (i_n + tl.arange(0, BN))[None, :]
            b_s = tl.where(sees_key(o_m[:, None], o_n, interval, pos, MODE), b_s, -float("inf"))

        if MODE.fixed_max:
            if i_n == n_start:  # used for all tiles: a row with few keys keeps the largest weight, 1, unrounded
                m = tl.maximum(tl.max(b_s, 1) * factor, LEAST_MAXIMUM)
            b_p = tl.exp2(b_s * factor - m[:, None])
            l += tl.sum(b_p, 1)
        else:
            # (BM,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
            m_new = tl.maximum(m, tl.max(b_s, 1) * factor)
            m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)
            alpha = tl.exp2(m - m_safe)
            m = m_new

            # (BM, BN) l is summed before anything is dropped.
            b_p = tl.exp2(b_s * factor - m_safe[:, None])
            l = l * alpha + tl.sum(b_p, 1)
        b_p = b_p.to(b_q.dtype) if scales is None else weights_in_8_bits(b_p)
        if THRESHOLD:
            b_p = drop(b_p, b_drop)

        # (BM, D)
        b_v = load_tile(v, i_b, i_kv, i_n, BN, BD)
        if not MODE.fixed_max:
            o = o * alpha[:, None]
        o = dot(b_p, b_v, o, MODE)

    # Kept weights are rescaled once, here, by the inverse of the keep probability.
    KEEP_SCALE: tl.constexpr = 256 / (256 - THRESHOLD)
    o = o * (KEEP_SCALE / l)[:, None]
    if scales is not None:
        o = o * (tl.load(scales + 2 * i_bh + 1) / LARGEST)
    # Rows that see no key are zero; l = 0 is no test, as scores of -inf give it too.
    if MODE.bounded or MODE.offsets:
        first, end = interval
        o = tl.where((first < end)[:, None], o, 0.0)  # type: ignore[index]
    elif MODE.causal:
        o = tl.where((o_m >= T - S)[:, None], o, 0.0)
    store_tile(out, i_b, i_h, i_m, o, BM, BD)
    lse2 = m + tl.log2(l)
    if MODE.alibi:
        lse2 -= b_row_bias
    store_lse(rows, lse2, i_bh, T, o_m)


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: KernelCall, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D) -> lse (B, H, T) and lse2; fills out, like q.

    lse2 is for the backward, see `rows_like`: lse in base 2, +inf for rows that saw nothing. `blocks` are those
    of the tables if none are given.
    """
    (B, H, T, _), S, scales = q.shape, k.shape[2], None
    lse, lse2 = q.new_empty(B, H, T, dtype=torch.float32), rows_like(q)
    if out.numel() == 0 or S == 0:
        return without_keys(out, lse, lse2, call.inputs.sinks)
    if call.spec.precision == "fp8":
        (q, q_scales), (k, k_scales), (v, v_scales) = map(in_8_bits, (q, k, v))
        scales = torch.stack([k_scales, v_scales], -1).repeat_interleave(H // k.shape[1], 1)
        scales[..., 0] *= q_scales
    mode, blocks = mode_of(call, q), blocks or choose(call.problem(q, k)).forward
    launch(
        forward_kernel,
        ((T + blocks.q - 1) // blocks.q * B * H,),
        tiles(q, blocks.q, mode.columns),
        tiles(k, blocks.k, mode.columns),
        tiles(v, blocks.k, mode.columns),
        tiles(out, blocks.q, mode.columns),
        Rows(lse, lse2),
        scales,
        kernel_inputs(call, T, S),
        launch_scalars(call, head_group_size(B * H, head_bytes(k), H // k.shape[1])),
        BLOCKS=blocks,
        MODE=mode,
        **compile_options(blocks),
    )
    return lse, lse2


def without_keys(out: Tensor, lse: Tensor, lse2: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fill in lse and lse2 where there is no key to see, from the sinks (H,) alone. Sets out to zero."""
    out.zero_()
    if sinks is None:
        return lse.fill_(-torch.inf), lse2.fill_(torch.inf)
    sinks = sinks[:, None]
    return lse.copy_(sinks.expand_as(lse)), lse2.copy_((sinks * LOG2_E.value).expand_as(lse2))


ROWS = 64


def factor_input(x: Tensor) -> tuple[Any, ...]:
    """Factors (B or 1, H or 1, T or 1) as a kernel's argument: with their strides, as `unspecialised` has them."""
    strides = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x, *map(unspecialised, strides))


@triton.jit
def load_factors(factors, i_b, i_h, o_m, T):
    """The factors of the queries o_m of a head; 0 beyond the last."""
    p_factors = factors[0] + (tl.cast(i_b, tl.int64) * (factors[1] >> 2) + tl.cast(i_h, tl.int64) * (factors[2] >> 2))
    return tl.load(p_factors + o_m.to(tl.int64) * (factors[3] >> 2), mask=o_m < T, other=0.0)


@triton.jit
def factors_kernel(x, y, q, sums, factors, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = A x, which may be x itself; where q is given, also sums (B, H, T) = rowsum(x q). Grid: tiles, B x H."""
    H, T = x.shape[1], x.shape[2]
    i_m, i_bh = tl.program_id(0) * ROWS, tl.program_id(1)
    i_b, i_h, o_m = i_bh // H, i_bh % H, i_m + tl.arange(0, ROWS)
    b_x = load_tile(x, i_b, i_h, i_m, ROWS, COLUMNS).to(tl.float32)
    if q is not None:
        b_q = load_tile(q, i_b, i_h, i_m, ROWS, COLUMNS).to(tl.float32)
        tl.store(sums + tl.cast(i_bh, tl.int64) * T + o_m, tl.sum(b_x * b_q, 1), mask=o_m < T)
    store_tile(y, i_b, i_h, i_m, b_x * load_factors(factors, i_b, i_h, o_m, T)[:, None], ROWS, COLUMNS)


def launch_factors(x: Tensor, y: Tensor, factors: Tensor, q: Tensor | None = None, sums: Tensor | None = None) -> None:
    """Launch `factors_kernel`."""
    B, H, T, D = x.shape
    columns = max(16, triton.next_power_of_2(D))
    descriptors = [None if z is None else tiles(z, ROWS, columns) for z in (x, y, q)]
    grid = (triton.cdiv(T, ROWS), B * H)
    sizes = {"ROWS": ROWS, "COLUMNS": columns}
    launch(factors_kernel, grid, *descriptors, sums, factor_input(factors), **sizes, enable_fp_fusion=True)


def scaled_queries(q: Tensor, factors: Tensor) -> Tensor:
    """q (B, H, T, D), addressable, times its rows' factors."""
    scaled = torch.empty_like(q)
    if q.numel():
        launch_factors(q, scaled, factors)
    return scaled


def scale_gradient(dq: Tensor, q: Tensor, factors: Tensor, learned: bool) -> Tensor | None:
    """Turn the gradient of the scaled queries into that of q, in place; the gradient of the factors if these learn."""
    if not dq.numel():
        return torch.zeros_like(factors) if learned else None
    sums = dq.new_empty(dq.shape[:3], dtype=torch.float32) if learned else None
    launch_factors(dq, dq, factors, q if learned else None, sums)
    if sums is None:
        return None
    shared = [axis for axis, size in enumerate(factors.shape) if size == 1 < sums.shape[axis]]
    return sums.sum(shared, keepdim=True, dtype=torch.float64).float() if shared else sums
