"""Keys and values in 8 bits, as the kernel of attention.precision=fp8 reads them.

FlashAttention-3 (Shah et al. 2024), section 3.3: e4m3 values with a scale for each tile, and q and k rotated by a
random orthogonal matrix R, which leaves (q R) (k R)^T = q k^T and spreads a column of outliers over all columns. q is
read once, and the kernel that reads it rotates and rounds it (hopper/fp8_queries.py).
R = diag(signs) Hadamard matrix: its entries are 1 and -1, so the products with it are exact, and (q R) (k R)^T is as
many times larger as R has columns.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from ...dropout.mask import philox
from ...gpu import INTERPRET, multiprocessors
from ..tiles import load_tile, tiles
from .configs import ForwardBlocks

KV_ROWS = tl.constexpr(128)  # that share a scale: a tile of keys
HALF = tl.constexpr(64)  # columns of q and k, and rows of v, that a product takes at once
PROGRAMS, STAGES = {64: 2, 128: 1}, 4  # on a multiprocessor, tiles in flight: as much as its shared memory holds
LARGEST = tl.constexpr(448.0)  # of e4m3
# A tile of smaller values gets the scale of these, so that scales and their products are normal numbers.
SMALLEST = tl.constexpr(2.0**-40)


class Quantised(NamedTuple):
    """k (B, H_kv, S, columns) rotated, and v (B, H_kv, columns, S padded) transposed, both in e4m3.

    Columns of k and keys of v are those of each sixteen in the order of `operand_order`, and v ends with zeros.

    scales  (B, H_kv, tiles of 128 keys, 2) fp32: the scale of k, and log2 of the scale of v
    work    (1,) int32, zero: the counter from which the programs of the attention kernel draw their queries
    """

    k: Tensor
    v: Tensor
    scales: Tensor
    work: Tensor


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
def tile_scale(b_max):
    """The scale of a tile whose rows have the largest magnitudes b_max (M,)."""
    return tl.maximum(tl.max(b_max, 0), SMALLEST) / LARGEST


@triton.jit
def in_8_bits(b_x):
    """b_x in e4m3."""
    if INTERPRET:  # whose rounding loses the carry of the last bit, and so has to find nothing to round
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits += 0x7FFFF + ((b_bits >> 20) & 1)
        b_x = (b_bits & -0x100000).to(tl.float32, bitcast=True)
    return b_x.to(tl.float8e4nv)


@triton.jit
def operand_order(b_x, M: tl.constexpr):
    """b_x (M, HALF) with the columns of every sixteen in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.

    A thread has each four as a result of a product, and as an operand it needs four that lie beside each other.
    """
    return b_x.reshape(M, HALF // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(1, 1, M, HALF)


@triton.jit
def rotate(k, k8, r, p_scales, first, n_programs, B, H, S, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Every n_programs-th tile of k, rotated, into k8, and its scale.

    The right half of a Hadamard matrix is the left one with the lower half's signs changed: two small products do.
    """
    b_upper = load_tile(r, 0, 0, 0, HALF, HALF)
    b_lower = load_tile(r, 0, 0, COLUMNS - HALF, HALF, HALF)
    n_tiles = tl.cdiv(S, KV_ROWS)
    for j in tl.range(first, n_tiles * B * H, n_programs, num_stages=STAGES):
        i = n_tiles * B * H - 1 - j
        i_bh, i_n = i // n_tiles, i % n_tiles * KV_ROWS
        i_b, i_h = i_bh // H, i_bh % H
        b_x = product(k.load([i_b, i_h, i_n, 0]).reshape(KV_ROWS, HALF), b_upper)
        if COLUMNS == HALF:
            b_scale = tile_scale(tl.max(tl.abs(b_x), 1))
            k8.store([i_b, i_h, i_n, 0], operand_order(in_8_bits(b_x * (1 / b_scale)), KV_ROWS))
        else:
            b_y = product(k.load([i_b, i_h, i_n, HALF]).reshape(KV_ROWS, HALF), b_lower)
            b_scale = tile_scale(tl.max(tl.abs(b_x) + tl.abs(b_y), 1))
            k8.store([i_b, i_h, i_n, 0], operand_order(in_8_bits((b_x + b_y) * (1 / b_scale)), KV_ROWS))
            k8.store([i_b, i_h, i_n, HALF], operand_order(in_8_bits((b_x - b_y) * (1 / b_scale)), KV_ROWS))
        tl.store(p_scales + 2 * i, b_scale)


@triton.jit
def transpose(v, v8, p_scales, first, n_programs, B, H, S, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """Every n_programs-th tile of v, transposed, into v8, and log2 of its scale.

    A product with the identity transposes it, and leaves a thread the keys that it is to store beside each other.
    """
    o = tl.arange(0, HALF)
    b_eye = tl.where(o[:, None] == o[None, :], 1.0, 0.0).to(v.dtype)
    n_tiles = tl.cdiv(S, KV_ROWS)
    for j in tl.range(first, n_tiles * B * H, n_programs, num_stages=STAGES):
        i = n_tiles * B * H - 1 - j
        i_bh, i_n = i // n_tiles, i % n_tiles * KV_ROWS
        i_b, i_h = i_bh // H, i_bh % H
        b_v = product(tl.trans(v.load([i_b, i_h, i_n, 0]).reshape(HALF, COLUMNS)), b_eye)
        b_w = product(tl.trans(v.load([i_b, i_h, i_n + HALF, 0]).reshape(HALF, COLUMNS)), b_eye)
        b_scale = tile_scale(tl.max(tl.maximum(tl.abs(b_v), tl.abs(b_w)), 1))
        v8.store([i_b, i_h, 0, i_n], operand_order(in_8_bits(b_v * (1 / b_scale)), COLUMNS))
        v8.store([i_b, i_h, 0, i_n + HALF], operand_order(in_8_bits(b_w * (1 / b_scale)), COLUMNS))
        tl.store(p_scales + 2 * i + 1, tl.log2(b_scale))


@triton.jit(do_not_specialize=["B", "H", "S"])
def quantise_kernel(k, v, k8, v8, r, p_scales, p_work, B, H, S, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """All tiles of 128 rows, the last first: the attention kernel begins with those that the L2 cache still has.

    Grid: one half of the programs for k, the other for v, all at the same time.
    """
    if tl.program_id(0) == 0:
        tl.store(p_work, 0)
    i, n = tl.program_id(0) // 2, tl.num_programs(0) // 2
    if tl.program_id(0) % 2 == 0:
        rotate(k, k8, r, p_scales, i, n, B, H, S, COLUMNS, STAGES)
    else:
        transpose(v, v8, p_scales, i, n, B, H, S, COLUMNS, STAGES)
    if not INTERPRET:
        gdc_launch_dependents()  # not earlier: programs of the attention kernel would only wait


def quantise(k: Tensor, v: Tensor, blocks: ForwardBlocks) -> Quantised:
    """k and v (B, H_kv, S, D) in bf16 or fp16, for the copy engine; not empty."""
    B, H, S, _ = k.shape
    rows, half, columns = KV_ROWS.value, HALF.value, blocks.columns
    n_tiles = triton.cdiv(S, rows)
    x = Quantised(
        k=k.new_empty(B, H, S, columns, dtype=torch.float8_e4m3fn),
        v=k.new_empty(B, H, columns, n_tiles * rows, dtype=torch.float8_e4m3fn),
        scales=k.new_empty(B, H, n_tiles, 2, dtype=torch.float32),
        work=k.new_empty(1, dtype=torch.int32),
    )
    n_programs = max(2, PROGRAMS[columns] * multiprocessors(k.device) // 2 * 2)
    quantise_kernel[(n_programs,)](
        tiles(k, rows, half),
        tiles(v, half, columns),
        tiles(x.k, rows, half),
        tiles(x.v, columns, half),
        tiles(rotation(columns, k.dtype, k.device), half, half),
        x.scales,
        x.work,
        B,
        H,
        S,
        COLUMNS=columns,
        STAGES=STAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return x
