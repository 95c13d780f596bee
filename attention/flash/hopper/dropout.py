"""The mask of attention/dropout in the registers of an accumulator: the same bits as everywhere.

One Philox call serves 16 weights, those that one thread holds of a 16 x 64 piece of an accumulator. In the forward the
layouts below put the call into that thread. For the transposed tiles of the backward a thread needs one of a call's
four words, and three other warps the rest: there the words change hands once, through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...dropout import kernel as plain

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
