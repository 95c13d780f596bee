"""The masks of a tile of scores in the registers of an accumulator: hidden keys, and dropout's.

A thread of an accumulator has two rows, and of each the columns 8 n + c and 8 n + c + 1, where c is 0, 2, 4 or 6. A row
sees an interval of keys, so a shift for each end makes a bit for each of a thread's columns. The compiler moves several
bits at once to predicates, where comparisons would take up to three instructions for each score.

Dropout has the same bits as everywhere, see attention/dropout. One Philox call serves 16 weights, those that one thread
holds of a 16 x 64 piece of an accumulator. In the forward the layouts below put the call into that thread. For the
transposed tiles of the backward a thread needs one of a call's four words, and three other warps the rest: there the
words change hands once, through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...dropout import kernel as plain


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


# The functions of the plain kernels, compiled as Gluon.
philox = gluon.jit(plain.philox.fn)
load_key = gluon.jit(plain.load_key.fn)
dropped_bytes = gluon.jit(plain.dropped_bytes.fn)


@gluon.constexpr_function
def call_layout(M, N):
    """Philox calls (M/2, N/8), each in the thread that holds its 16 weights of an (M, N) accumulator of four warps."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1]] + [[0, 8 << i] for i in range((N // 64).bit_length() - 1)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[M // 2, N // 8],
    )


@gluon.constexpr_function
def word_layout(rows, columns, warps):
    """Words (rows, columns), a byte for each weight of a (2 rows, 2 columns) accumulator, in the threads that hold it.

    The words of neighbouring columns are neighbours: their weights share a register.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1]] + [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.constexpr_function
def spread_call_layout(M, N, warps):
    """Philox calls (M/2, N/8) spread evenly over four or eight warps, for words that change hands anyway."""
    last = [[0, 8]] if N == 128 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i, 0] for i in range(3, (M // 2).bit_length() - 2)] + (last if warps == 4 else []),
        lane_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [M // 4, 0]] + (last if warps == 8 else []),
        block_bases=[],
        shape=[M // 2, N // 8],
    )


# Of words (N/2, M/2) that change hands: eight rows of four pairs meet no bank twice.
WORDS_IN_SHARED_MEMORY = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))


@gluon.jit
def draw(key, i_m, i_n, M: gl.constexpr, N: gl.constexpr, CALLS: gl.constexpr):
    """Random words for queries [i_m, i_m + M) and keys [i_n, i_n + N): (M/2, N/64, j & 7, bit 4 of j, bit 5 of j)."""
    o_r = key.R + (i_m // 2 + gl.arange(0, M // 2, gl.SliceLayout(1, CALLS))).to(gl.uint32)
    o_c = key.C + (i_n // 8 + gl.arange(0, N // 8, gl.SliceLayout(0, CALLS))).to(gl.uint32)
    b_w0, b_w1, b_w2, b_w3 = philox(key.c0, o_c[None, :], key.c2, o_r[:, None], key.k0, key.k1)
    return gl.join(gl.join(b_w0, b_w1), gl.join(b_w2, b_w3)).reshape([M // 2, N // 64, 8, 2, 2])


@gluon.jit
def clear(b_p, b_drop):
    """b_p of 16 bits, zero where b_drop has its bits set: a lop3 of 0x30 is a and not b."""
    b_drop = gl.convert_layout(b_drop, b_p.type.layout)
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0, 0x30;", "=r,r,r", [b_p, b_drop], dtype=b_p.dtype, is_pure=True, pack=2
    )


@gluon.jit
def drop(b_p, key, i_m, i_n, THRESHOLD: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """b_p (M, N) of four warps, queries from i_m and keys from i_n, with dropped weights set to zero."""
    CALLS: gl.constexpr = call_layout(M, N)
    WORDS: gl.constexpr = word_layout(M // 2, N // 2, 4)
    b_w = draw(key, i_m, i_n, M, N, CALLS).permute([0, 1, 4, 3, 2]).reshape([M // 2, N // 2])
    m_3, m_2, m_1, m_0 = dropped_bytes(gl.convert_layout(b_w, WORDS), THRESHOLD)
    # (i >> 4, i & 7, j >> 4, j & 7, bit 3 of i, bit 3 of j) -> (M, N)
    b_drop = gl.join(gl.join(m_3, m_1), gl.join(m_2, m_0)).reshape([M // 16, 8, N // 16, 8, 2, 2])
    return clear(b_p, b_drop.permute([0, 4, 1, 2, 5, 3]).reshape([M, N]))


@gluon.jit
def draw_transposed(key, i_m, i_n, M: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """The words (N/2, M/2) of keys from i_n and queries from i_m, drawn by so many warps."""
    CALLS: gl.constexpr = spread_call_layout(M, N, WARPS)
    return draw(key, i_m, i_n, M, N, CALLS).permute([1, 4, 3, 2, 0]).reshape([N // 2, M // 2])


@gluon.jit
def drop_transposed(b_p, b_w, THRESHOLD: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """b_p (N, M) with dropped weights set to zero; b_w are dropout's words, in the `word_layout` of its warps."""
    m_3, m_2, m_1, m_0 = dropped_bytes(b_w, THRESHOLD)
    # (j >> 4, j & 7, i >> 4, i & 7, bit 3 of i, bit 3 of j) -> (N, M)
    b_drop = gl.join(gl.join(m_3, m_1), gl.join(m_2, m_0)).reshape([N // 16, 8, M // 16, 8, 2, 2])
    return clear(b_p, b_drop.permute([0, 5, 1, 2, 4, 3]).reshape([N, M]))
