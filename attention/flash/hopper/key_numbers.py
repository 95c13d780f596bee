"""The values that a formula adds to the scores of each key, as an operand of the product q k^T.

A fp32 value is the sum of three bf16 values. They are columns of a narrow matrix, and its product with ones is
the first addend of q k^T: no thread loads a key's number, or keeps it in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..call import KernelCall
from ..formula import LARGEST_TILE, plan_of
from .softmax import PARTS
from .tiles import parts_tiles

COLUMNS = tl.constexpr(8)  # of the matrix in device memory: rows of 16 bytes


@triton.jit
def split(x):
    """(high, middle, low): three fp32 values, exact in bf16, whose sum is x; of infinity, it and two zeros."""
    high = x.to(tl.bfloat16).to(tl.float32)
    is_finite = tl.abs(high) < float("inf")
    rest = tl.where(is_finite, x - tl.where(is_finite, high, 0.0), 0.0)
    middle = rest.to(tl.bfloat16).to(tl.float32)
    return high, middle, rest - middle


@triton.jit(do_not_specialize=["stride_b", "stride_h", "scale", "H", "S"])
def parts_kernel(x, p_parts, stride_b, stride_h, scale, H, S, ROWS: tl.constexpr):
    """The parts of ROWS values of x, divided by scale; zeros beyond the last key. Grid: tiles, batch x heads."""
    i_b, i_h = tl.program_id(1) // H, tl.program_id(1) % H
    o_n, o_c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    p_x = x + (tl.cast(i_b, tl.int64) * stride_b + tl.cast(i_h, tl.int64) * stride_h)
    high, middle, low = split(tl.load(p_x + o_n, mask=o_n < S, other=0.0) / scale)
    b_rest = tl.where(o_c == 1, middle[:, None], tl.where(o_c == 2, low[:, None], 0.0))
    o_row = tl.cast(tl.program_id(1), tl.int64) * (tl.num_programs(0) * ROWS) + o_n
    tl.store(p_parts + o_row[:, None] * COLUMNS + o_c, tl.where(o_c == 0, high[:, None], b_rest).to(tl.bfloat16))


def key_numbers(call: KernelCall, q: Tensor, S: int, rows: int) -> TensorDescriptor:
    """What a formula adds for each of S keys, by query head, as the forward kernel moves it: `rows` keys at a time."""
    p = plan_of(call.spec.score)
    assert call.inputs.formula is not None
    assert p.column is not None
    x, (B, H) = call.inputs.formula[p.column], q.shape[:2]
    n_tiles = triton.cdiv(S, LARGEST_TILE.value)
    parts = q.new_empty(B * H * n_tiles * LARGEST_TILE.value, COLUMNS.value, dtype=torch.bfloat16)
    strides = (0 if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    parts_kernel[(n_tiles, B * H)](
        x, parts, *strides, call.spec.scale, H, S, ROWS=LARGEST_TILE.value, enable_fp_fusion=True
    )
    return parts_tiles(parts, rows, PARTS.value)
