"""The sum of the residual stream and its norm in one pass, and their gradients in another, in Triton.

A row is in registers from its first read to its last write. A program of the gradients has every so-manieth row, and
adds up its part of the gradients of the norm's weights and biases.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of the gradients: the same number for each of the 132 multiprocessors of an H100 or H200


class Row(NamedTuple):
    """A row of the stream.

    columns  and the next power of two
    stats    numbers that the gradients need: 1 / sqrt(...) and, where the norm subtracts it, the mean
    sums     gradients added up over rows: none, of the weights, or of weights and biases
    """

    columns: int
    block: int
    stats: int
    sums: int = 0

    @property
    def warps(self) -> int:
        """Of a program: four columns for each thread, 16 bytes in fp32."""
        return min(max(self.block // 128, 1), 16)


@triton.jit
def load_kept(p_bits, i, o_c, m_c, C: tl.constexpr):
    """Whether dropout keeps each of the C columns of row i; model/dropout.py has the places of the bits."""
    BYTES: tl.constexpr = (C + 63) // 64 * 8
    # Eight columns have the same bit of eight bytes, which one load fetches.
    o_byte = tl.max_contiguous(tl.multiple_of((o_c >> 6) * 8 + (o_c & 7), 8), 8)
    b_byte = tl.load(p_bits + i * BYTES + o_byte, mask=m_c, other=0)
    return ((b_byte >> ((o_c >> 3) & 7).to(tl.uint8)) & 1) != 0


@triton.jit
def add_norm_kernel(p_x, p_out, p_bits, p_weight, p_bias, p_sum, p_h, p_stats, scale, eps, ROW: tl.constexpr):
    """One row of the sum, of its norm h, and the statistics that the gradients need. Grid: rows."""
    C: tl.constexpr = ROW.columns
    BLOCK: tl.constexpr = ROW.block
    STATS: tl.constexpr = ROW.stats
    i = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < C
    b_out = tl.load(p_out + i * C + o_c, mask=m_c, other=0.0).to(tl.float32)
    if p_bits is not None:
        b_out = tl.where(load_kept(p_bits, i, o_c, m_c, C), b_out * scale, 0.0)
    b_x = tl.load(p_x + i * C + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_x = (b_x + b_out).to(p_sum.dtype.element_ty)
    tl.store(p_sum + i * C + o_c, b_x, mask=m_c)

    b_x = b_x.to(tl.float32)
    if STATS == 2:
        mean = tl.sum(b_x, 0) / C
        tl.store(p_stats + i * STATS + 1, mean)
        b_x = tl.where(m_c, b_x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(b_x * b_x, 0) / C + eps)
    tl.store(p_stats + i * STATS, rstd)
    b_h = b_x * rstd
    if p_weight is not None:
        b_h *= tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_h += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_h + i * C + o_c, b_h.to(p_h.dtype.element_ty), mask=m_c)


@triton.jit
def add_norm_gradient_kernel(
    p_dsum, p_dh, p_x, p_stats, p_bits, p_weight, p_dx, p_dout, p_parts, scale, N, ROW: tl.constexpr
):  # fmt: skip
    """dx and dout of some of N rows, and their part of the sums over rows. Grid: programs.

    p_dsum: of what comes after the sum besides the norm. p_dout: None where it is dx.
    """
    C: tl.constexpr = ROW.columns
    BLOCK: tl.constexpr = ROW.block
    STATS: tl.constexpr = ROW.stats
    SUMS: tl.constexpr = ROW.sums
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < C
    b_w = 1.0
    if p_weight is not None:
        b_w = tl.load(p_weight + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dw = tl.zeros([BLOCK], tl.float32)
    b_db = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), N, tl.num_programs(0)):
        i = tl.cast(row, tl.int64)
        o_x = i * C + o_c
        b_dh = tl.load(p_dh + o_x, mask=m_c, other=0.0).to(tl.float32)
        b_x = tl.load(p_x + o_x, mask=m_c, other=0.0).to(tl.float32)
        b_dsum = tl.load(p_dsum + o_x, mask=m_c, other=0.0).to(tl.float32)
        rstd = tl.load(p_stats + i * STATS)
        if STATS == 2:
            b_x -= tl.load(p_stats + i * STATS + 1)
        b_n = b_x * rstd  # beyond the row's end it meets a b_dh of 0
        if SUMS > 0:
            b_dw += b_dh * b_n
        if SUMS > 1:
            b_db += b_dh
        b_dn = b_dh * b_w
        along = tl.sum(b_dn * b_n, 0) / C
        mean = tl.sum(b_dn, 0) / C if STATS == 2 else 0.0
        b_dx = b_dsum + (b_dn - mean - b_n * along) * rstd
        tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_c)
        if p_dout is not None:
            if p_bits is not None:
                b_dx = tl.where(load_kept(p_bits, i, o_c, m_c, C), b_dx * scale, 0.0)
            tl.store(p_dout + o_x, b_dx.to(p_dout.dtype.element_ty), mask=m_c)
    if SUMS > 0:
        tl.store(p_parts + tl.program_id(0) * C + o_c, b_dw, mask=m_c)
    if SUMS > 1:
        tl.store(p_parts + (tl.num_programs(0) + tl.program_id(0)) * C + o_c, b_db, mask=m_c)


def launch_add_norm(
    x: Tensor,
    out: Tensor,
    bits: Tensor | None,
    scale: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `add_norm` of model/fused_norm.py, for contiguous tensors."""
    C = x.shape[-1]
    row, rows = Row(C, triton.next_power_of_2(C), 1 + centred), x.numel() // C
    total, h = torch.empty_like(x), torch.empty_like(out)
    stats = torch.empty(rows, row.stats, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        add_norm_kernel[(rows,)](
            x, out, bits, weight, bias, total, h, stats, scale, eps, row, num_warps=row.warps, enable_fp_fusion=True
        )
    return total, h, stats


def launch_add_norm_gradient(
    d_sum: Tensor,
    d_h: Tensor,
    x: Tensor,
    stats: Tensor,
    bits: Tensor | None,
    scale: float,
    weight: Tensor | None,
    sums: int,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """As `add_norm_gradient` of model/fused_norm.py, for contiguous tensors; None for a dout that is dx."""
    C = x.shape[-1]
    row, rows = Row(C, triton.next_power_of_2(C), stats.shape[1], sums), x.numel() // C
    programs = min(rows, PROGRAMS)
    d_x = torch.empty_like(x)
    d_out = None if bits is None and x.dtype == d_h.dtype else torch.empty_like(d_h)
    parts = torch.empty(sums, programs, C, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        add_norm_gradient_kernel[(programs,)](
            d_sum,
            d_h,
            x,
            stats,
            bits,
            weight,
            d_x,
            d_out,
            parts,
            scale,
            rows,
            row,
            num_warps=row.warps,
            enable_fp_fusion=True,
        )
    return d_x, d_out, parts.sum(1)
