"""What a backward computes of each row of queries before its kernels: delta, and lse2 as these read it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import tiles as plain
from ..score import LOG2_E


class Counters(NamedTuple):
    """In device memory, set to zero before the kernels that count; None for those that a head size does not need.

    next_tile  for each query tile the next key tile that may add to its dq
    work       the next key tile to take
    dq_work    the next query tile to take, where dq has a kernel of its own
    """

    next_tile: Any
    work: Any
    dq_work: Any


class Rows(NamedTuple):
    """Values of each row of queries that `delta_kernel` stores; None for those that the next kernel does not read.

    parts  (rows of whole tiles, 8) bf16: lse2 and delta as operands of a product, in alternate columns; or 16 columns,
           with ones in every second of the last 8
    """

    lse2: Any
    delta: Any
    parts: Any


@triton.jit
def split(x):
    """x (M,) as (M, 4): three values, exact in bf16, whose sum is -x, and a zero."""
    high = -x.to(tl.bfloat16).to(tl.float32)
    middle = -(x + high).to(tl.bfloat16).to(tl.float32)
    low = -x - high - middle
    return tl.join(tl.join(high, low), tl.join(middle, tl.zeros_like(x))).reshape([x.shape[0], 4])


class DeltaConstants(NamedTuple):
    """`delta_kernel`'s constants besides its tiles."""

    keep: float  # probability that dropout keeps a weight
    biased: bool  # whether `Rows.parts` has ones, for the parts of a bias of the keys


@triton.jit(do_not_specialize=["scale_log2", "H", "T", "n_m"])
def delta_kernel(
    out, do, lse2, rows, counters, slopes, scale_log2, H, T, n_m, BLOCKS: tl.constexpr, CONSTANTS: tl.constexpr
):  # fmt: skip
    """delta of one tile of queries without dropout's rescaling, and lse2, which with ALiBi includes the query biases.

    Also sets the counters of the kernels that follow to zero. Grid: n_m tiles x batch x heads.
    """
    BM: tl.constexpr = BLOCKS.q
    BD: tl.constexpr = BLOCKS.columns
    i_bh, i_m = tl.program_id(0) // n_m, tl.program_id(0) % n_m * BM
    b_do = plain.load_tile(do, i_bh // H, i_bh % H, i_m, BM, BD).to(tl.float32)
    b_out = plain.load_tile(out, i_bh // H, i_bh % H, i_m, BM, BD).to(tl.float32)
    b_delta = tl.sum(b_out * b_do, 1) * CONSTANTS.keep
    o_m = i_m + tl.arange(0, BM)
    o_row = i_bh.to(tl.int64) * tl.cdiv(T, plain.ROW_ALIGNMENT) * plain.ROW_ALIGNMENT + o_m
    o_tile = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    # Rows beyond the end have an infinite lse2 and so no weight: ALiBi gives all queries of a part the bias of its
    # first one, which can be large.
    b_lse2 = tl.load(lse2 + o_row, mask=o_m < T, other=float("inf"))
    if slopes is not None:
        b_lse2 += tl.load(slopes + i_bh % H) * LOG2_E * (o_m % BLOCKS.part).to(tl.float32)
    if rows.lse2 is not None:
        tl.store(rows.lse2 + o_tile, b_lse2)
    if rows.delta is not None:
        tl.store(rows.delta + o_row, b_delta, mask=o_m < T)
    if rows.parts is not None:
        # 1e30 for infinity, which has no second and third part.
        b_lse = tl.where(b_lse2 == float("inf"), 1e30, b_lse2 / scale_log2)
        b_parts = tl.join(split(b_lse), split(b_delta)).reshape([BM, 8])
        if CONSTANTS.biased:  # ones, for the parts of the bias
            p_parts = rows.parts + o_tile[:, None] * 16 + tl.arange(0, 8)[None, :]
            tl.store(p_parts, b_parts.to(tl.bfloat16))
            ones = tl.zeros([BM, 8], tl.float32) + (1 - tl.arange(0, 8) % 2)[None, :]
            tl.store(p_parts + 8, ones.to(tl.bfloat16))
        else:
            tl.store(rows.parts + o_tile[:, None] * 8 + tl.arange(0, 8)[None, :], b_parts.to(tl.bfloat16))
    if counters.next_tile is not None:
        tl.store(counters.next_tile + tl.program_id(0), 0)
    tl.store(counters.work, 0, mask=tl.program_id(0) == 0)
    if counters.dq_work is not None:
        tl.store(counters.dq_work, 0, mask=tl.program_id(0) == 0)
