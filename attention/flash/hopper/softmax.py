"""The softmax of a warpgroup's scores: what the accumulator's layout lets its threads do without each other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of queries: what a warpgroup multiplies at once


@gluon.jit
def row_max(b_s, N: gl.constexpr, BLOCKS: gl.constexpr):
    """The maximum of each row. Two consumers have the registers to follow several chains of maxima at once."""
    if BLOCKS.consumers == 2:
        b_s = gl.max(gl.max(b_s.reshape([ROWS, N // 32, 4, 8]), 1), 1)
    return gl.max(b_s, 1)


@gluon.jit
def row_sum(b_p, N: gl.constexpr):
    """(ROWS, 4): what each of a row's four threads holds of it, summed. The four are added once, at the end."""
    return gl.sum(gl.sum(b_p.reshape([ROWS, N // 8, 4, 2]), 1), 2)


@gluon.constexpr_function
def rescale_asm(n):
    """PTX for n registers of a thread and their factors, which are those of two rows, alternating in pairs."""
    moves = " ".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"""{{
        .reg .pred p, q;
        {moves}
        setp.ne.f32 p, ${2 * n}, 0f3F800000;
        setp.ne.or.f32 q, ${2 * n + 2}, 0f3F800000, p;
        vote.sync.any.pred p, q, 0xffffffff;
        @!p bra DONE;
        {products}
        DONE:
        }}"""


@gluon.constexpr_function
def rescale_constraints(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def rescale(o, alpha, BD: gl.constexpr):
    """o times each row's factor; a warp whose factors are all 1, as they most often are, skips the products."""
    N: gl.constexpr = BD // 2  # registers of o in a thread
    ASM: gl.constexpr = rescale_asm(N)
    CONSTRAINTS: gl.constexpr = rescale_constraints(N)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [o, alpha[:, None]], dtype=gl.float32, is_pure=True, pack=N)
