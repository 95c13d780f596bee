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
PROGRAMS, STAGES = 2, 2  # on a multiprocessor, tiles in flight: as much as its shared memory holds
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
def in_8_bits(b_x, ROWS: tl.constexpr):
    """b_x in e4m3, and the scale of every ROWS rows."""
    N: tl.constexpr = b_x.shape[0] // ROWS
    b_max = tl.max(tl.max(tl.abs(b_x), 1).reshape(N, ROWS), 1)
    b_scale = tl.maximum(b_max, SMALLEST) / LARGEST
    b_inverse = tl.broadcast_to((1 / b_scale)[:, None], (N, ROWS)).reshape(b_x.shape[0])
    b_x *= b_inverse[:, None]
    if INTERPRET:  # whose rounding loses the carry of the last bit, and so has to find nothing to round
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits += 0x7FFFF + ((b_bits >> 20) & 1)
        b_x = (b_bits & -0x100000).to(tl.float32, bitcast=True)
    return b_x.to(tl.float8e4nv), b_scale


@triton.jit
def rotate(
    x, x8, b_r, p_scales, n_heads, H, T, ROWS: tl.constexpr, STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """This program's tiles of q or k, rotated, into x8, and the scales of every ROWS rows."""
    n_tiles, n_scales = tl.cdiv(T, KV_ROWS), tl.cdiv(T, ROWS)
    for i in tl.range(tl.program_id(0), n_tiles * n_heads, tl.num_programs(0), num_stages=STAGES):
        i_bh, i_t = i // n_tiles, i % n_tiles * KV_ROWS
        b_x = load_tile(x, i_bh // H, i_bh % H, i_t, KV_ROWS, COLUMNS)
        if INTERPRET:  # which would multiply bfloat16's bit patterns
            b_x, b_r = b_x.to(tl.float32), b_r.to(tl.float32)
        b_x8, b_scale = in_8_bits(tl.dot(b_x, b_r), ROWS)
        x8.store([i_bh // H, i_bh % H, i_t, 0], b_x8.reshape(1, 1, KV_ROWS, COLUMNS))
        o_scales = i_t // ROWS + tl.arange(0, KV_ROWS // ROWS)
        tl.store(p_scales + (i_bh * n_scales + o_scales) * STRIDE, b_scale, mask=o_scales < n_scales)


@triton.jit(do_not_specialize=["B", "H", "H_kv", "T", "S"])
def quantise_kernel(q, k, v, q8, k8, v8, r, p_q, p_kv, B, H, H_kv, T, S, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """All tiles of 128 rows of q, then of k, then of v. Grid: as many programs as run at the same time."""
    b_r = load_tile(r, 0, 0, 0, COLUMNS, COLUMNS)
    rotate(q, q8, b_r, p_q, B * H, H, T, Q_ROWS, 1, COLUMNS, STAGES)
    rotate(k, k8, b_r, p_kv, B * H_kv, H_kv, S, KV_ROWS, 2, COLUMNS, STAGES)
    # A product with the identity transposes v, and leaves a thread the keys that it is to store beside each other.
    o = tl.arange(0, KV_ROWS)
    b_eye = tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(v.dtype)
    n_tiles = tl.cdiv(S, KV_ROWS)
    for i in tl.range(tl.program_id(0), n_tiles * B * H_kv, tl.num_programs(0), num_stages=STAGES):
        i_bh, i_n = i // n_tiles, i % n_tiles * KV_ROWS
        b_v = tl.trans(load_tile(v, i_bh // H_kv, i_bh % H_kv, i_n, KV_ROWS, COLUMNS))
        if INTERPRET:
            b_v, b_eye = b_v.to(tl.float32), b_eye.to(tl.float32)
        b_v8, b_scale = in_8_bits(tl.dot(b_v, b_eye), COLUMNS)
        b_v8 = b_v8.reshape(COLUMNS, KV_ROWS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
        v8.store([i_bh // H_kv, i_bh % H_kv, 0, i_n], b_v8.reshape(1, 1, COLUMNS, KV_ROWS))
        tl.store(p_kv + 2 * i + 1 + tl.arange(0, 1), tl.log2(b_scale))


def quantise(q: Tensor, k: Tensor, v: Tensor, blocks: ForwardBlocks) -> Quantised:
    """q (B, H, T, D), k and v (B, H_kv, S, D) in bf16 or fp16, for the copy engine; none is empty."""
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    rows, columns = KV_ROWS.value, blocks.columns
    n_q, n_kv = triton.cdiv(T, rows), triton.cdiv(S, rows)
    x = Quantised(
        q=q.new_empty(B, H, T, columns, dtype=torch.float8_e4m3fn),
        k=q.new_empty(B, H_kv, S, columns, dtype=torch.float8_e4m3fn),
        v=q.new_empty(B, H_kv, columns, n_kv * rows, dtype=torch.float8_e4m3fn),
        q_scales=q.new_empty(B, H, triton.cdiv(T, Q_ROWS.value), dtype=torch.float32),
        kv_scales=q.new_empty(B, H_kv, n_kv, 2, dtype=torch.float32),
    )
    n_programs = PROGRAMS * multiprocessors(q.device)
    quantise_kernel[(min(n_programs, max(n_q * H, n_kv * H_kv) * B),)](
        tiles(q, rows, columns),
        tiles(k, rows, columns),
        tiles(v, rows, columns),
        tiles(x.q, rows, columns),
        tiles(x.k, rows, columns),
        tiles(x.v, columns, rows),
        tiles(rotation(columns, q.dtype, q.device), columns, columns),
        x.q_scales,
        x.kv_scales,
        B,
        H,
        H_kv,
        T,
        S,
        COLUMNS=columns,
        STAGES=STAGES,
        num_warps=8,
    )
    return x
