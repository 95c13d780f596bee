"""The mask of mask.py, drawn inside the kernels: the same bits, in the registers that need them.

A score tile on a tensor core leaves each thread with rows {i, i + 8} and columns {j, j + 1, j + 8, j + 9, ...}. The
mask's layout hands one Philox call 16 weights of exactly that shape, so for S (the forward and dq) no bit ever moves
between threads. For the transposed tiles of dk and dv, a thread holds one word of a call and its neighbours the other
three; there the 32-bit words, a quarter of the weights in number, change hands once through shared memory.

A mask has 16 bits a weight, all set where it is dropped. Two instructions apply it to a pair of weights:
`prmt` spreads a byte's sign bit over a half-word, `lop3` clears what is dropped, where a comparison and a select would
each cost one a weight (and the predicates, 16 a call, do not fit the predicate registers).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu import INTERPRET


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox 4x32-7: counter and key of broadcastable uint32 to four random words (see mask.py)."""
    for _ in tl.static_range(7):
        # One wide product is one instruction; the high and the low half apart would be two.
        product_0 = c0.to(tl.uint64) * 0xD2511F53
        product_1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product_0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


class HeadKey(NamedTuple):
    """Shared by all weights of one head: counter and key words of Philox, and the first values of c1 and c3."""

    c0: Any  # the sequence
    c2: Any  # the layer and the head
    k0: Any  # the seed
    k1: Any  # the step
    C: Any  # column group of the call's first key
    R: Any  # row group of the call's first query


@triton.jit
def load_key(p_key, i_b, i_h):
    """The packed key of a call (DropoutKey.pack) for its sequence i_b and its head i_h."""
    seed, step = tl.load(p_key), tl.load(p_key + 1)
    layer, first_sequence, first_head = tl.load(p_key + 2), tl.load(p_key + 3), tl.load(p_key + 4)
    first_query, first_key = tl.load(p_key + 5), tl.load(p_key + 6)
    c0, c2 = (first_sequence + i_b).to(tl.uint32), ((layer << 16) + first_head + i_h).to(tl.uint32)
    C, R = (first_key // 8).to(tl.uint32), (first_query // 2).to(tl.uint32)
    return HeadKey(c0, c2, seed.to(tl.uint32), step.to(tl.uint32), C, R)


@triton.jit
def dropped_bytes(b_w, THRESHOLD: tl.constexpr):
    """A mask for each byte of a word, the most significant byte first: 16 bits, set where the byte is < THRESHOLD."""
    if INTERPRET:  # which knows no inline assembly
        m_3 = tl.where(b_w < THRESHOLD << 24, -1, 0).to(tl.int16)
        m_2 = tl.where((b_w << 8) < THRESHOLD << 24, -1, 0).to(tl.int16)
        m_1 = tl.where((b_w << 16) < THRESHOLD << 24, -1, 0).to(tl.int16)
        m_0 = tl.where((b_w << 24) < THRESHOLD << 24, -1, 0).to(tl.int16)
        return m_3, m_2, m_1, m_0
    # One instruction compares four bytes: |byte - (THRESHOLD + 127)| has its sign bit, the eighth, for those below
    # THRESHOLD and no others; and |byte - (THRESHOLD - 128)|, where that is not negative, for all others.
    FEW: tl.constexpr = THRESHOLD <= 128
    DISTANT: tl.constexpr = (THRESHOLD + 127 if FEW else THRESHOLD - 128) * 0x01010101
    INVERT: tl.constexpr = "" if FEW else "not.b32 x, x; not.b32 y, y;"
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 x, y, distant;
        mov.b32 distant, {DISTANT};
        vabsdiff4.u32.u32.u32 x, $4, distant, distant;
        vabsdiff4.u32.u32.u32 y, $5, distant, distant;
        {INVERT}
        prmt.b32 $0, x, y, 0xffbb;
        prmt.b32 $1, x, y, 0xeeaa;
        prmt.b32 $2, x, y, 0xdd99;
        prmt.b32 $3, x, y, 0xcc88;
        }}""",
        "=r,=r,=r,=r,r,r",
        [b_w],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def dropped_tile(key, i_m, i_n, THRESHOLD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The mask of query rows [i_m, i_m + M) and key columns [i_n, i_n + N), int16: -1 where dropped, 0 where kept.

    i_m is a multiple of 16, i_n one of 64, and so are M and N. (M, N), or (N, M) if TRANSPOSED.
    """
    o_r = key.R + (i_m // 2 + tl.arange(0, M // 2)).to(tl.uint32)
    o_c = key.C + (i_n // 8 + tl.arange(0, N // 8)).to(tl.uint32)
    # 4 x (M/2, N/8)
    b_w0, b_w1, b_w2, b_w3 = philox(key.c0, o_c[None, :], key.c2, o_r[:, None], key.k0, key.k1)
    # (M/2, N/64, j & 7, bit 4 of j, bit 5 of j) -> (M/2, N/2): a word for every four weights
    b_w = tl.join(tl.join(b_w0, b_w1), tl.join(b_w2, b_w3)).reshape(M // 2, N // 64, 8, 2, 2)
    if TRANSPOSED:
        # The leading axis of length 1 is where the compiler hoists the exchange between threads to: onto the words.
        b_w = b_w.permute(1, 4, 3, 2, 0).reshape(N // 2, M // 2)[None, :, :]
        m_3, m_2, m_1, m_0 = dropped_bytes(b_w, THRESHOLD)
        # (j >> 4, j & 7, i >> 4, i & 7, bit 3 of i, bit 3 of j) -> (N, M)
        b_drop = tl.join(tl.join(m_3, m_1), tl.join(m_2, m_0)).reshape(N // 16, 8, M // 16, 8, 2, 2)
        b_drop = b_drop.permute(0, 5, 1, 2, 4, 3).reshape(N, M)
    else:
        b_w = b_w.permute(0, 1, 4, 3, 2).reshape(M // 2, N // 2)
        m_3, m_2, m_1, m_0 = dropped_bytes(b_w, THRESHOLD)
        # (i >> 4, i & 7, j >> 4, j & 7, bit 3 of i, bit 3 of j) -> (M, N)
        b_drop = tl.join(tl.join(m_3, m_1), tl.join(m_2, m_0)).reshape(M // 16, 8, N // 16, 8, 2, 2)
        b_drop = b_drop.permute(0, 4, 1, 2, 5, 3).reshape(M, N)
    return b_drop


@triton.jit
def drop(b_x, b_drop):
    """b_x, zero where b_drop is set: a lop3 of 0x30 is a and not b."""
    if INTERPRET:
        return tl.where(b_drop != 0, 0.0, b_x).to(b_x.dtype)
    if b_x.dtype == tl.float32:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y;
            prmt.b32 x, $4, 0, 0x9999;
            prmt.b32 y, $4, 0, 0xbbbb;
            lop3.b32 $0, $2, x, 0, 0x30;
            lop3.b32 $1, $3, y, 0, 0x30;
            }""",
            "=r,=r,r,r,r",
            [b_x, b_drop],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0, 0x30;", "=r,r,r", [b_x, b_drop], dtype=b_x.dtype, is_pure=True, pack=2
    )
