"""Which tile a program works on, and which tiles see each other: all roles of a kernel must agree on it."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Sizes(NamedTuple):
    """Of a call: query heads H, query heads G that share a key/value head, queries T, keys S of a sequence.

    n_tiles of a head, n_heads of the batch, and n_together heads that run at the same time (see `locate`).
    """

    H: Any
    G: Any
    T: Any
    S: Any
    n_tiles: Any
    n_heads: Any
    n_together: Any


@gluon.jit
def locate(i_work, sizes):
    """(tile, head) of a unit of work: heads in sections of n_together, and all heads of a section tile by tile."""
    i_section = i_work // (sizes.n_together * sizes.n_tiles)
    i_rest = i_work % (sizes.n_together * sizes.n_tiles)
    n_here = gl.minimum(sizes.n_heads - i_section * sizes.n_together, sizes.n_together)
    return i_rest // n_here, i_section * sizes.n_together + i_rest % n_here


@gluon.jit
def key_tiles(i_m, sizes, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """(n_full, n_end): queries [i_m, i_m + BM) see the key tiles before n_full whole, and none sees any from n_end on.

    n_end is at least 1, so that queries that see nothing go the same way as the others.
    """
    T = sizes.T
    S = sizes.S
    if CAUSAL:
        n_full = gl.minimum(gl.maximum(i_m + 1 + S - T, 0), S) // BN
        n_end = gl.cdiv(gl.minimum(gl.maximum(i_m + BM + S - T, 1), S), BN)
    else:
        n_full = S // BN
        n_end = gl.cdiv(S, BN)
    return n_full, n_end


@gluon.jit
def query_tiles(i_tile, sizes, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """(m_start, m_last, m_full, m_end): the query tiles [m_start, m_end) see something of key tile i_tile.

    Those before m_last see no key tile after this one. Those from m_full on see all of its keys.
    """
    T = sizes.T
    S = sizes.S
    m_end = gl.cdiv(T, BM)
    is_last = i_tile == sizes.n_tiles - 1
    if CAUSAL:
        i_m = i_tile * BN + T - S
        m_start = gl.minimum(gl.maximum(i_m, 0) // BM, m_end)
        m_last = gl.where(is_last, m_end, gl.minimum(gl.maximum(i_m + BN, 0) // BM, m_end))
        m_full = gl.minimum(gl.cdiv(gl.maximum(i_m + BN - 1, 0), BM), m_end)
    else:
        m_start = m_end * 0
        m_last = gl.where(is_last, m_end, 0)
        m_full = gl.where(i_tile * BN + BN > S, m_end, 0)
    return m_start, m_last, m_full, m_end
