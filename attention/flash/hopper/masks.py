"""The mask of a tile of scores in the registers of an accumulator: a bit for each of a thread's columns.

A thread of an accumulator has two rows, and of each the columns 8 n + c and 8 n + c + 1, where c is 0, 2, 4 or 6. A row
sees an interval of keys, so a shift for each end makes its bits. The compiler moves several bits at once to predicates,
where comparisons would take up to three instructions for each score.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def as_bits(BLOCKS, MODE):
    """Whether a mask is bits: comparisons are faster where registers are scarce, and at head sizes above 128."""
    if BLOCKS.consumers == 3 and (MODE.threshold or MODE.alibi):
        return False
    if MODE.threshold and (MODE.fixed_max or (MODE.alibi and MODE.columns == 64)):
        return False
    return MODE.columns <= 128


@gluon.jit
def columns_before(bound, N: gl.constexpr, LAYOUT: gl.constexpr):
    """How many of a thread's columns come before column `bound` (M,) of a tile: (M, N), the same along a row."""
    o_c = gl.arange(0, N, gl.SliceLayout(0, LAYOUT)) & 6
    o_n = gl.maximum(bound[:, None] - o_c[None, :], 0)
    return 2 * (o_n >> 3) + gl.minimum(o_n & 7, 2)


@gluon.constexpr_function
def hide_asm(n, BOUNDED):
    """PTX for n registers of a thread, in which pairs of columns of its two rows alternate, and the columns before the
    end of each row's interval; where it is bounded also those before its start."""
    lines = []
    for row in range(2):
        lines.append(f"min.s32 x, ${2 * n + 2 * row}, 32; bmsk.clamp.b32 seen{row}, 0, x;")
        if BOUNDED:
            lines.append(f"shl.b32 x, -1, ${3 * n + 2 * row}; and.b32 seen{row}, seen{row}, x;")
    for i in range(n):
        bit = 1 << (i // 4 * 2 + i % 2)
        lines.append(
            f"and.b32 x, seen{i // 2 % 2}, {bit}; setp.ne.s32 p, x, 0; selp.f32 ${i}, ${n + i}, 0fFF800000, p;"
        )
    return "{ .reg .pred p; .reg .b32 x, seen0, seen1; " + " ".join(lines) + " }"


@gluon.constexpr_function
def hide_constraints(n, BOUNDED):
    return ",".join(["=f"] * n + ["f"] * n + ["r"] * (2 * n if BOUNDED else n))


@gluon.jit
def hide(b_s, o_m, i_n, interval, pos, MODE: gl.constexpr):
    """Scores (M, N) of the queries o_m (M,) and the keys from i_n, a multiple of 8: -inf where one does not see a key.

    interval  of `key_interval`, where MODE has documents. Other bounds are computed here: no registers are free to keep
              them from tile to tile
    """
    N: gl.constexpr = b_s.shape[1]
    LAYOUT: gl.constexpr = b_s.type.layout
    BOUNDED: gl.constexpr = MODE.bounded
    ASM: gl.constexpr = hide_asm(N // 2, BOUNDED)
    CONSTRAINTS: gl.constexpr = hide_constraints(N // 2, BOUNDED)
    if MODE.causal:
        end = o_m + (pos.offset + 1)  # at most S, unless there are offsets
        if MODE.offsets:
            end = gl.minimum(end, pos.S)
    elif MODE.documents:
        end = interval[1]
    else:
        end = o_m * 0 + pos.S
    operands = (b_s, columns_before(end - i_n, N, LAYOUT))
    if BOUNDED:
        first = interval[0] if MODE.documents else o_m + (pos.offset - (MODE.window - 1))
        operands += (columns_before(first - i_n, N, LAYOUT),)  # type: ignore[assignment]
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, operands, dtype=gl.float32, is_pure=True, pack=N // 2)
