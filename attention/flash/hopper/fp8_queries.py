"""Queries in 8 bits: each consumer of hopper/fp8_forward.py rotates and rounds its queries, which stay in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .compat import reinterpret, tma_load
from .fp8 import HALF, LARGEST, SMALLEST
from .fp8_weights import approximate, in_operand_order
from .softmax import ROWS


@gluon.jit
def load_rotation(r, COLUMNS: gl.constexpr):
    """(the left half of R in shared memory, HALF rows at a time, a barrier that signals when it is filled)."""
    N: gl.constexpr = COLUMNS // HALF
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HALF], r.dtype)
    b_r = gl.allocate_shared_memory(r.dtype, [N, HALF, HALF], layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, N * r.block_type.nbytes)
    for i in gl.static_range(N):
        b_half = reinterpret(b_r.index(i), r.dtype, [1, 1, HALF, HALF], r.layout)
        tma_load(r, [0, 0, i * HALF, 0], full, b_half)
    return b_r, full


@gluon.jit
def rotated_queries(b_q, rotation, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr):
    """(q R divided by its scale, in e4m3, as an operand (ROWS, COLUMNS); the scale of each query).

    As in `rotate`, the right half of R is the left one with the lower half's signs changed. The columns are
    `in_operand_order`, as k's are.
    """
    N: gl.constexpr = COLUMNS // HALF
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    half_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], b_q.dtype)
    b_halves = reinterpret(b_q, b_q.dtype, [N, ROWS, HALF], half_layout)
    zeros = gl.zeros([ROWS, HALF], gl.float32, X_LAYOUT)
    x_flight = warpgroup_mma(b_halves.index(0), rotation.index(0), zeros, use_acc=False, is_async=True)
    if N == 1:
        b_x = warpgroup_mma_wait(0, deps=(x_flight,))
        largest = gl.maximum(gl.max(gl.abs(b_x), 1), SMALLEST)
        b_x = b_x * (LARGEST * approximate("rcp", largest))[:, None]
    else:
        y_flight = warpgroup_mma(b_halves.index(1), rotation.index(1), zeros, use_acc=False, is_async=True)
        b_x, b_y = warpgroup_mma_wait(0, deps=(x_flight, y_flight))
        largest = gl.maximum(gl.max(gl.abs(b_x) + gl.abs(b_y), 1), SMALLEST)
        inverse = (LARGEST * approximate("rcp", largest))[:, None]
        b_x, b_y = b_x * inverse, b_y * inverse
        b_x = gl.join(b_x + b_y, b_x - b_y).permute([0, 2, 1]).reshape([ROWS, COLUMNS])
    b_q8 = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [gl.convert_layout(in_operand_order(b_x, COLUMNS), LAYOUT)],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )
    return b_q8, largest * (1 / LARGEST)
