"""The weights of attention.precision=fp8: from scores to e4m3 values that the product with v takes from registers.

The exponentials of a tile would take a multiprocessor as long as both of its products at head size 128. So there are
none: an e4m3 number, its bits read as an integer, is nearly a logarithm, 8 (log2(p) + 7), where 2^f is taken for 1 + f,
and a score is a logarithm already.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import ROWS

# A row's largest weight is 2^OFFSET or, until its maximum has grown by 2^GROWTH and is taken anew, less than 448, the
# largest number. Weights below 2^-7 become 0. A smaller OFFSET would leave more room for growth, and lose more of the
# small weights, whose sum counts where the inputs have outliers.
OFFSET = gl.constexpr(8)
GROWTH = gl.constexpr(0.75)
# The mean of 8 (log2(1 + f) - f), which is at most 0.7 of a unit of the last place.
CENTRE = gl.constexpr(0.45)
# fp16 values below 2^-13 are whole multiples of it, and their bits say how many.
UNIT = gl.constexpr(2.0**-24)


@gluon.jit
def approximate(OPERATION: gl.constexpr, x):
    """OPERATION, rcp or lg2, of fp32 by the hardware's approximation, off by about 2^-22: one instruction for ten."""
    return gl.inline_asm_elementwise(
        OPERATION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def weights(b_s, scale, shift):
    """2^(scale s + shift) for `as_operand`, (ROWS, N) fp32: the bits that it has in e4m3, unrounded, in UNITs."""
    return b_s * (scale * (8 * UNIT))[:, None] + ((shift * 8 + (8 * 7 - CENTRE)) * UNIT)[:, None]


@gluon.jit
def in_operand_order(b_x, N: gl.constexpr):
    """A product's result (ROWS, N) as an operand of 8 bits, its columns such that none changes threads.

    A thread has columns 2 t, 2 t + 1 of every eight as a result, and 4 t to 4 t + 3 of every sixteen as an operand.
    """
    return b_x.reshape([ROWS, N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([ROWS, N])


@gluon.jit
def as_operand(b_p32, N: gl.constexpr, P_LAYOUT: gl.constexpr):
    """The result of `weights` in e4m3, an operand of the product with v, whose keys are `in_operand_order` too."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high;
        cvt.rn.relu.f16x2.f32 low, $2, $1;
        cvt.rn.relu.f16x2.f32 high, $4, $3;
        prmt.b32 $0, low, high, 0x6420;
        }""",
        "=r,f,f,f,f",
        [gl.convert_layout(in_operand_order(b_p32, N), P_LAYOUT)],
        dtype=gl.float8e4nv,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def release(b_p):
    """To be called when the products that read b_p are done: it keeps b_p in its registers until then.

    For 16 bits warpgroup_mma_wait does that; it takes no operands of 8 bits.
    """
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_p], dtype=b_p.dtype, is_pure=False, pack=4)


@gluon.jit
def allocate_ones(N: gl.constexpr, dtype: gl.constexpr):
    """(N, 8) ones in shared memory, by which a product sums the weights as they were rounded."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
    ones = gl.allocate_shared_memory(dtype, [8, N], gl.NVMMASharedLayout.get_default_for([8, N], dtype))
    # The bits of 1.0: ptxas 12.8 leaves half a register undefined if one conversion to e4m3 is to fill both halves.
    ones.store(gl.full([8, N], 0x38, gl.int8, LAYOUT).to(dtype, bitcast=True))
    return ones.permute((1, 0))
