"""Queries, keys and values in 8 bits, as the kernel of attention.precision=fp8 reads them.

FlashAttention-3 (Shah et al. 2024), section 3.3: e4m3 numbers with a scale for each tile, and q and k rotated by a
random orthogonal matrix R, which leaves (q R) (k R)^T = q k^T and spreads a column of outliers over all columns.
R = diag(signs) Hadamard matrix: its entries are 1 and -1, so the products with it are exact, and (q R) (k R)^T is as
many times larger as R has columns.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dropout.mask import philox
from ...gpu import INTERPRET, multiprocessors
from ..tiles import load_tile, tiles
from .configs import ForwardBlocks

Q_ROWS = tl.constexpr(64)  # that share a scale: the queries of a consumer
KV_ROWS = tl.constexpr(128)  # that share a scale: a tile of keys
HALF = tl.constexpr(64)  # columns of q and k, and rows of v, that a product takes at once
PROGRAMS, STAGES = {64: 2, 128: 1}, 3  # on a multiprocessor, tiles in flight: as much as its shared memory holds
LARGEST = tl.constexpr(448.0)  # of e4m3
# A tile of smaller numbers gets the scale of these, so that scales and their products are normal numbers.
SMALLEST = tl.constexpr(2.0**-40)


class Quantised(NamedTuple):
    """q (B, H, T, columns) and k (B, H_kv, S, columns) rotated, v (B, H_kv, columns, S padded) transposed, all in e4m3.

    The keys of v are those of each sixteen in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, and the rest is zero.

    q_scales   (B, H, tiles of 64 queries) fp32
    kv_scales  (B, H_kv, tiles of 128 keys, 2) fp32: the scale of k, and log2 of the scale of v
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scales: Tensor
    kv_scales: Tensor


@cache
def rotation(columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """R, (1, 1, columns, columns): the sign of row i is the lowest bit of Philox at counter i."""
    i = torch.arange(columns)
    signs = 1 - 2 * (philox([i, *[torch.zeros_like(i)] * 3], [torch.zeros_like(i)] * 2)[0] & 1)
    hadamard = torch.ones(1, 1, dtype=i.dtype)
    while len(hadamard) < columns:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    return (signs[:, None] * hadamard).to(device, dtype)[None, None]


@triton.jit
def product(b_x, b_y):
    """b_x b_y in fp32."""
    if INTERPRET:  # which would multiply bfloat16's bit patterns
        b_x, b_y = b_x.to(tl.float32), b_y.to(tl.float32)
    return tl.dot(b_x, b_y)


@triton.jit
def scales(b_max, ROWS: tl.constexpr):
    """The scale of every ROWS rows whose largest numbers are b_max (M,), and its inverse for each row, (M, 1)."""
    N: tl.constexpr = b_max.shape[0] // ROWS
    b_scale = tl.maximum(tl.max(b_max.reshape(N, ROWS), 1), SMALLEST) / LARGEST
    return b_scale, tl.broadcast_to((1 / b_scale)[:, None], (N, ROWS)).reshape(b_max.shape[0])[:, None]


@triton.jit
def in_8_bits(b_x):
    """b_x in e4m3."""
    if INTERPRET:  # whose rounding loses the carry of the last bit, and so has to find nothing to round
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits += 0x7FFFF + ((b_bits >> 20) & 1)
        b_x = (b_bits & -0x100000).to(tl.float32, bitcast=True)
    return b_x.to(tl.float8e4nv)


@triton.jit
def rotate(
    x, x8, r, p_scales, first, n_programs, B, H, T, ROWS: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Every n_programs-th tile of q or k from the first on, rotated, into x8, and the scales of every ROWS rows.

    The right half of a Hadamard matrix is the left one with the lower half's signs changed: two small products do.
    """
    b_upper = load_tile(r, 0, 0, 0, HALF, HALF)
    b_lower = load_tile(r, 0, 0, COLUMNS - HALF, HALF, HALF)
    n_tiles, n_scales = tl.cdiv(T, KV_ROWS), tl.cdiv(T, ROWS)
    for i in tl.range(first, n_tiles * B * H, n_programs, num_stages=STAGES):
        i_bh, i_t = i // n_tiles, i % n_tiles * KV_ROWS
        i_b, i_h = i_bh // H, i_bh % H
        b_x = product(x.load([i_b, i_h, i_t, 0]).reshape(KV_ROWS, HALF), b_upper)
        if COLUMNS == HALF:
            b_scale, b_inverse = scales(tl.max(tl.abs(b_x), 1), ROWS)
            x8.store([i_b, i_h, i_t, 0], in_8_bits(b_x * b_inverse).reshape(1, 1, KV_ROWS, HALF))
        else:
            b_y = product(x.load([i_b, i_h, i_t, HALF]).reshape(KV_ROWS, HALF), b_lower)
            b_scale, b_inverse = scales(tl.max(tl.abs(b_x) + tl.abs(b_y), 1), ROWS)
            x8.store([i_b, i_h, i_t, 0], in_8_bits((b_x + b_y) * b_inverse).reshape(1, 1, KV_ROWS, HALF))
            x8.store([i_b, i_h, i_t, HALF], in_8_bits((b_x - b_y) * b_inverse).reshape(1, 1, KV_ROWS, HALF))
        o_scales = i_t // ROWS + tl.arange(0, KV_ROWS // ROWS)
        tl.store(p_scales + (i_bh * n_scales + o_scales) * STRIDE, b_scale, mask=o_scales < n_scales)


@triton.jit
def store_transposed(v8, i_b, i_h, i_n, b_v, COLUMNS: tl.constexpr):
    """b_v (COLUMNS, HALF) into v8, with the keys of every sixteen in their order there."""
    b_v8 = in_8_bits(b_v).reshape(COLUMNS, HALF // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    v8.store([i_b, i_h, 0, i_n], b_v8.reshape(1, 1, COLUMNS, HALF))


@triton.jit
def transpose(v, v8, p_kv, first, n_programs, B, H, S, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Every n_programs-th tile of v from the first on, transposed, into v8, and log2 of its scale.

    A product with the identity transposes it, and leaves a thread the keys that it is to store beside each other.
    """
    o = tl.arange(0, HALF)
    b_eye = tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(v.dtype)
    n_tiles = tl.cdiv(S, KV_ROWS)
    for i in tl.range(first, n_tiles * B * H, n_programs, num_stages=STAGES):
        i_bh, i_n = i // n_tiles, i % n_tiles * KV_ROWS
        i_b, i_h = i_bh // H, i_bh % H
        b_v = product(tl.trans(v.load([i_b, i_h, i_n, 0]).reshape(HALF, COLUMNS)), b_eye)
        b_w = product(tl.trans(v.load([i_b, i_h, i_n + HALF, 0]).reshape(HALF, COLUMNS)), b_eye)
        b_scale, b_inverse = scales(tl.max(tl.maximum(tl.abs(b_v), tl.abs(b_w)), 1), COLUMNS)
        store_transposed(v8, i_b, i_h, i_n, b_v * b_inverse, COLUMNS)
        store_transposed(v8, i_b, i_h, i_n + HALF, b_w * b_inverse, COLUMNS)
        tl.store(p_kv + 2 * i + 1 + tl.arange(0, 1), tl.log2(b_scale))


@triton.jit(do_not_specialize=["B", "H", "H_kv", "T", "S", "n_q", "n_k"])
def quantise_kernel(
    q, k, v, q8, k8, v8, r, p_q, p_kv, B, H, H_kv, T, S, n_q, n_k, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """All tiles of 128 rows. Grid: n_q programs for q, n_k for k, and the others for v, all at the same time."""
    i = tl.program_id(0)
    if i < n_q:
        rotate(q, q8, r, p_q, i, n_q, B, H, T, Q_ROWS, 1, COLUMNS, STAGES)
    elif i < n_q + n_k:
        rotate(k, k8, r, p_kv, i - n_q, n_k, B, H_kv, S, KV_ROWS, 2, COLUMNS, STAGES)
    else:
        transpose(v, v8, p_kv, i - n_q - n_k, tl.num_programs(0) - n_q - n_k, B, H_kv, S, COLUMNS, STAGES)


def quantise(q: Tensor, k: Tensor, v: Tensor, blocks: ForwardBlocks) -> Quantised:
    """q (B, H, T, D), k and v (B, H_kv, S, D) in bf16 or fp16, for the copy engine; none is empty."""
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    rows, half, columns = KV_ROWS.value, HALF.value, blocks.columns
    n_tiles = triton.cdiv(S, rows)
    x = Quantised(
        q=q.new_empty(B, H, T, columns, dtype=torch.float8_e4m3fn),
        k=q.new_empty(B, H_kv, S, columns, dtype=torch.float8_e4m3fn),
        v=q.new_empty(B, H_kv, columns, n_tiles * rows, dtype=torch.float8_e4m3fn),
        q_scales=q.new_empty(B, H, triton.cdiv(T, Q_ROWS.value), dtype=torch.float32),
        kv_scales=q.new_empty(B, H_kv, n_tiles, 2, dtype=torch.float32),
    )
    n_programs = max(3, PROGRAMS[columns] * multiprocessors(q.device))
    n_k = max(1, round(n_programs * S * H_kv / (T * H + 2 * S * H_kv)))  # as q, k and v have tiles
    n_q = max(1, n_programs - 2 * n_k)
    quantise_kernel[(n_q + 2 * n_k,)](
        tiles(q, rows, half),
        tiles(k, rows, half),
        tiles(v, half, columns),
        tiles(x.q, rows, half),
        tiles(x.k, rows, half),
        tiles(x.v, columns, half),
        tiles(rotation(columns, q.dtype, q.device), half, half),
        x.q_scales,
        x.kv_scales,
        B,
        H,
        H_kv,
        T,
        S,
        n_q,
        n_k,
        COLUMNS=columns,
        STAGES=STAGES,
        num_warps=4,
    )
    return x
