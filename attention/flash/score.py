"""Which keys a tile of queries sees, and which queries see a tile of keys: said once for all kernels."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Lengths(NamedTuple):
    """Queries T and keys S of a sequence."""

    T: Any
    S: Any


@triton.jit
def seen_keys(i_m, lengths, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(n_full, n_end) for the queries from i_m: all see every key before n_full, and none sees any from n_end on.

    Key tiles between the two are cut by the diagonal or by the end of the sequence. n_full is a multiple of BLOCKS.k.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    T, S = lengths
    if MODE.causal:
        n_full = tl.minimum(tl.maximum(i_m + 1 + S - T, 0), S) // BN * BN
        n_end = tl.minimum(tl.maximum(i_m + BM + S - T, 0), S)
    else:
        n_full = S // BN * BN
        n_end = S
    return n_full, n_end


@triton.jit
def seeing_queries(i_n, lengths, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(m_start, m_full) for the keys from i_n: no query before m_start sees any, and all from m_full on see every key.

    Query tiles between the two are cut by the diagonal. Both are multiples of BLOCKS.q.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    T, S = lengths
    if MODE.causal:
        m_start = tl.maximum(i_n + T - S, 0) // BM * BM
        m_full = tl.minimum(tl.cdiv(tl.maximum(i_n + BN - 1 + T - S, 0), BM) * BM, tl.cdiv(T, BM) * BM)
    else:
        m_start = 0
        m_full = 0
    return m_start, m_full
