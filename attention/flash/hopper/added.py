"""Formulas that only add a value to s: one for each distance i - j, for each pair of query and key, or for each key.

Distances: from some distance on, all values may be the same. A tile of such pairs is computed like causal attention:
its value joins the row's offset, with which the scores enter the exponential. Only nearer tiles gather values. The
length of the vector of distances determines these tiles, whatever the formula's text is.

Pairs: the accumulators of the products q k^T begin with their values. They are loaded a step before, and a producer
requests them for the L2 cache before that: the latency of memory is longer than a step.

Keys: a fp32 value is the sum of three bf16 values. They are columns of a narrow matrix, and its product with ones is
the first addend of q k^T: no thread loads a key's number, or keeps it in registers.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...gpu import ALIGNMENT
from ...spec import Inputs, Spec
from .. import tiles as plain
from ..call import KernelCall, Mode
from ..formula import COLUMN_ALIGNMENT, LARGEST_TILE, Distances, Pairs, added_by, kernel_inputs, plan_of, written
from ..launch import launch
from ..score import LOG2_E
from .program import parts_tiles

STAGES = ("distance", "pair")  # of values that the Hopper kernels add by themselves
ALIGNED = tl.constexpr(COLUMN_ALIGNMENT)
PARTS = tl.constexpr(16)  # columns of the smallest product: three parts of each of up to two numbers, and zeros
LINE = tl.constexpr(32)  # fp32 values that the L2 cache holds together
ROOM = tl.constexpr(192)  # values on either side of those of distances: as far as a tile reaches


@lru_cache(maxsize=1024)
def hopper_mode(spec: Spec, head_dim: int, dtype: torch.dtype, horizon: bool) -> Mode:
    """The `kernel_mode` of a call, without its formula if that only adds a value."""
    mode, added = plain.kernel_mode(spec, head_dim, dtype, horizon), added_by(spec.score)
    return mode._replace(formula=None, added=added) if added in STAGES else mode


def hopper_inputs(call: KernelCall, T: int, S: int) -> Inputs:
    """The inputs of a call as kernels get them; of a formula's, the number that it adds alone."""
    inputs, score = kernel_inputs(call, T, S), call.spec.score
    if added_by(score) not in STAGES:
        return inputs
    number = written(score).added
    if added_by(score) == "pair":
        return inputs._replace(formula=(pair_input(call.inputs.formula[number]),))
    return inputs._replace(formula=(distance_input(call.inputs.formula[number], inputs.formula[number]),))


def distance_input(x: Tensor, plain_input: Distances) -> Distances:
    """Numbers of distances (B or 1, H or 1, length) as these kernels read them: all of a near tile, without masks.

    plain_input  as `kernel_inputs` has them; here both ends go on for as far as a tile reaches.
    """
    x = F.pad(x, (ROOM.value, ROOM.value), mode="replicate")
    stride_b, stride_h = (plain.unspecialised(0 if x.shape[n] == 1 else x.stride(n)) for n in range(2))
    return plain_input._replace(pointer=x, stride_b=stride_b, stride_h=stride_h)


def pair_input(x: Tensor) -> Pairs:
    """Values of pairs (B or 1, H or 1, T, S) as these kernels read them: without masks, and several at a time.

    The stride of rows is a multiple of COLUMN_ALIGNMENT, and rows are padded to whole tiles of keys.
    """
    T, S = x.shape[2:]
    steps = [stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if size > 1]
    if S % LARGEST_TILE.value or x.data_ptr() % ALIGNMENT or any(stride % COLUMN_ALIGNMENT for stride in steps):
        x = F.pad(x, (0, -S % LARGEST_TILE.value)).contiguous()
    strides = [0 if x.shape[n] == 1 else x.stride(n) // COLUMN_ALIGNMENT for n in range(3)]
    return Pairs(x, *map(plain.unspecialised, (*strides, T, S)))


@triton.jit
def first_number(x, i_b, i_h):
    """The address of a head's values; x is from `distance_input`."""
    return x.pointer + (tl.cast(i_b, tl.int64) * (x.stride_b >> 2) + i_h * (x.stride_h >> 2) + ROOM)


@triton.jit
def far_number(inputs, i_b, i_h, MODE: tl.constexpr):
    """The value of the furthest distances, times log2(e); 0 where a formula adds no values for distances."""
    far = 0.0
    if MODE.added == "distance":
        x = inputs.formula[0]
        far = tl.load(first_number(x, i_b, i_h) + ((x.size >> 2) - 1)) * LOG2_E
    return far


@triton.jit
def is_near(x, i_m, i_n, BN: tl.constexpr, pos):
    """Whether a pair of the queries from i_m and the BN keys from i_n has another value than the furthest."""
    return i_m + pos.offset - (i_n + (BN - 1)) < (x.lowest >> 2) + (x.size >> 2) - 1


@triton.jit
def near_numbers(x, i_b, i_h, i_m, i_n, o_rows, o_columns, BN: tl.constexpr, pos):
    """The numbers of the pairs of at most 64 queries from i_m and BN keys, at most 128, from i_n.

    o_rows, o_columns  the tile's rows and columns: m of queries i_m + m, and BN - 1 - n of keys i_n + n. What columns
                       add to an address is then part of the instruction
    """
    # No query of a tile that lies further ahead of its keys sees one of them.
    o = tl.maximum(i_m - i_n + (pos.offset - (x.lowest >> 2)), -64)
    return tl.load((first_number(x, i_b, i_h) + (o - (BN - 1)) + o_rows) + o_columns)


@triton.jit
def pair_place(x, i_b, i_h, i_m, i_n):
    """The address of the value of query i_m and key i_n, and the stride of rows."""
    step = (x.stride_row >> 2) * ALIGNED
    o_head = (tl.cast(i_b, tl.int64) * (x.stride_b >> 2) + tl.cast(i_h, tl.int64) * (x.stride_h >> 2)) * ALIGNED
    return x.pointer + (o_head + tl.cast(i_m, tl.int64) * step + i_n), step


@triton.jit
def pair_numbers(x, i_b, i_h, i_m, i_n, o_m, o_n):
    """The values of the queries i_m + o_m and the keys i_n + o_n; beyond the last query, those of the last."""
    T = x.rows >> 2
    i_m = tl.maximum(tl.minimum(i_m, T - 1), 0)
    first, step = pair_place(x, i_b, i_h, i_m, i_n)
    return tl.load((first + tl.minimum(o_m, T - 1 - i_m) * step) + o_n)  # o_n is part of the instruction


@gluon.jit
def prefetch_pairs(x, i_b, i_h, i_m, i_n, ROWS: gl.constexpr, BN: gl.constexpr):
    """One warp requests the values of ROWS queries from i_m and BN keys from i_n for the L2 cache."""
    LINES: gl.constexpr = BN // LINE
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LINES, LINES], [1, 1], [1, 0])
    T, S = x.rows >> 2, x.columns >> 2
    i_m = gl.maximum(gl.minimum(i_m, T - 1), 0)
    first, step = pair_place(x, i_b, i_h, i_m, 0)
    o_n = gl.minimum(i_n + gl.arange(0, LINES, gl.SliceLayout(0, LAYOUT)) * LINE, S - 1)[None, :]
    for i in range(0, ROWS, 32):
        o_m = gl.minimum(i + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT)), T - 1 - i_m)[:, None]
        ASM: gl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        gl.inline_asm_elementwise(ASM, "=r,l", [first + (o_m * step + o_n)], dtype=gl.int32, is_pure=False, pack=1)


COLUMNS = tl.constexpr(8)  # of the matrix in device memory: rows of 16 bytes


@triton.jit
def bf16_parts(x):
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
    high, middle, low = bf16_parts(tl.load(p_x + o_n, mask=o_n < S, other=0.0) / scale)
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
    launch(
        parts_kernel,
        (n_tiles, B * H),
        x,
        parts,
        *strides,
        call.spec.scale,
        H,
        S,
        ROWS=LARGEST_TILE.value,
        enable_fp_fusion=True,
    )
    return parts_tiles(parts, rows, PARTS.value)
