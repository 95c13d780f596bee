"""The counterpart of attention/score.py in Triton, for a kernel's tiles: which keys are visible, how scores change.

The kernels of hopper/ call these functions too. Gluon gives a tensor its layout from its operands, so none is made here
from a shape alone.

    seen_keys, seeing_queries       the tiles to visit, and which of them need no mask
    key_interval, query_interval    the keys a query sees and the queries that see a key, always an interval
    sees_key, seen_by_query         the mask of a tile
    change_scores                   soft cap, then ALiBi, by the functions of attention/scores/; scores in base 2

Query i has the position of key i + offset, where offset is S - T unless the layout gives positions.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu import LOG2_E

GRAIN = tl.constexpr(64)  # queries, or keys, that share a horizon of a formula


class Positions(NamedTuple):
    """The positions of T queries and S keys of one sequence, and the bounds of its documents, if it has any."""

    T: Any
    S: Any
    offset: Any
    k_start: Any
    p_starts: Any
    p_ends: Any
    length: Any  # of the documents' row
    horizon: Any  # of ALiBi, or where those of a formula begin, see horizon.py


@triton.jit
def locate(T, S, inputs, scalars, i_b, i_bh, n_heads):
    """The positions of sequence i_b, for n_heads query heads from i_bh, an index over the heads of all sequences.

    scalars has q_start and k_start unless the last query has the position of the last key.
    """
    offset = S - T if scalars.q_start is None else (scalars.q_start >> 2) - (scalars.k_start >> 2)
    k_start = 0 if scalars.k_start is None else scalars.k_start >> 2
    horizon = 0
    if inputs.horizons is not None:
        if inputs.slopes is None:
            horizon = inputs.horizons + tl.cast(i_bh, tl.int64) * (tl.cdiv(T, GRAIN) + tl.cdiv(S, GRAIN))
        else:  # the furthest
            horizon = tl.load(inputs.horizons + i_bh)
            for i in range(1, n_heads):
                horizon = tl.maximum(horizon, tl.load(inputs.horizons + i_bh + i))
    if inputs.starts is None:  # zeros for missing fields: in Triton 3.6 no function returns a tuple with None in it
        pos = Positions(T, S, offset, k_start, 0, 0, 0, horizon)
    else:
        length = scalars.length >> 2
        o_row = tl.cast(i_b, tl.int64) * length
        pos = Positions(T, S, offset, k_start, inputs.starts + o_row, inputs.ends + o_row, length, horizon)
    return pos


@triton.jit
def document_bound(p_bounds, o_own, pos):
    """The start or end of the documents at keys o_own, as indices of keys; -k_start outside of the row."""
    o_position = o_own + pos.k_start
    return tl.load(p_bounds + o_position, mask=(o_position >= 0) & (o_position < pos.length), other=0) - pos.k_start


@triton.jit
def seen_keys(i_m, pos, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(n_start, n_full_start, n_full_end, n_end): the keys that one of the queries from i_m sees, n_start to n_end.

    All of the queries see all keys from n_full_start to n_full_end. The other tiles are cut by the diagonal, a window,
    a document's bounds or the end of the sequence. All but n_end are multiples of BLOCKS.k. A horizon cuts none: the
    keys beyond it have no weight anyway.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    S = pos.S
    if MODE.causal:
        n_full_end = tl.minimum(tl.maximum(i_m + 1 + pos.offset, 0), S) // BN * BN
        n_end = tl.minimum(tl.maximum(i_m + BM + pos.offset, 0), S)
    else:
        n_full_end = S // BN * BN
        n_end = S
    n_start = 0
    n_full_start = 0
    if MODE.bounded:
        own = i_m + pos.offset
        if MODE.window:
            n_start = own - (MODE.window - 1)
            n_full_start = own + BM - MODE.window
        if MODE.documents:
            own_last = tl.minimum(own + BM, pos.T + pos.offset) - 1
            n_start = tl.maximum(n_start, document_bound(pos.p_starts, own, pos))
            n_full_start = tl.maximum(n_full_start, document_bound(pos.p_starts, own_last, pos))
            if not MODE.causal:
                n_full_end = tl.minimum(n_full_end, tl.maximum(document_bound(pos.p_ends, own, pos), 0) // BN * BN)
                n_end = tl.minimum(n_end, document_bound(pos.p_ends, own_last, pos))
        n_start = tl.maximum(n_start, 0) // BN * BN
        n_full_start = tl.cdiv(tl.maximum(n_full_start, 0), BN) * BN
    if MODE.horizon and MODE.alibi:
        n_start = tl.maximum(n_start, tl.maximum(i_m + pos.offset - (pos.horizon - 1), 0) // BN * BN)
    elif MODE.horizon:
        n_start = tl.maximum(n_start, tl.load(pos.horizon + i_m // GRAIN) // BN * BN)
    return n_start, n_full_start, n_full_end, n_end


@triton.jit
def seeing_queries(i_n, pos, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(m_start, m_full_start, m_full_end, m_end): the queries that see one of the keys from i_n, m_start to m_end.

    Tiles from m_full_start that end by m_full_end see all of them. Both starts are multiples of BLOCKS.q.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    T = pos.T
    m_start = 0
    m_full_start = 0
    m_full_end = T
    m_end = T
    if MODE.causal:
        m_start = tl.maximum(i_n - pos.offset, 0) // BM * BM
        m_full_start = tl.minimum(tl.cdiv(tl.maximum(i_n + BN - 1 - pos.offset, 0), BM) * BM, tl.cdiv(T, BM) * BM)
    if MODE.bounded:
        m_full_end = tl.cdiv(T, BM) * BM
        i_last = tl.minimum(i_n + BN, pos.S) - 1
        if MODE.window:
            m_full_end = tl.minimum(m_full_end, i_n + MODE.window - pos.offset)
            m_end = tl.minimum(m_end, i_last + MODE.window - pos.offset)
        if MODE.documents:
            m_full_end = tl.minimum(m_full_end, document_bound(pos.p_ends, i_n, pos) - pos.offset)
            m_end = tl.minimum(m_end, document_bound(pos.p_ends, i_last, pos) - pos.offset)
            if not MODE.causal:
                m_start = tl.maximum(document_bound(pos.p_starts, i_n, pos) - pos.offset, 0) // BM * BM
                m_full_start = tl.cdiv(tl.maximum(document_bound(pos.p_starts, i_last, pos) - pos.offset, 0), BM) * BM
    if MODE.horizon and MODE.alibi:
        m_end = tl.minimum(m_end, tl.minimum(i_n + BN, pos.S) - 1 + pos.horizon - pos.offset)
    elif MODE.horizon:
        p_end = pos.horizon + tl.cdiv(T, GRAIN) + (tl.minimum(i_n + BN, pos.S) - 1) // GRAIN
        m_end = tl.minimum(m_end, tl.load(p_end))
    return m_start, m_full_start, m_full_end, m_end


@triton.jit
def key_interval(o_m, pos, MODE: tl.constexpr):
    """(first, end): the queries o_m see the keys from `first` up to, but not including, `end`."""
    o_own = o_m + pos.offset
    first = o_own * 0
    end = tl.minimum(o_own + 1, pos.S) if MODE.causal else first + pos.S
    if MODE.window:
        first = tl.maximum(first, o_own - (MODE.window - 1))
    if MODE.documents:
        first = tl.maximum(first, document_bound(pos.p_starts, o_own, pos))
        if not MODE.causal:
            end = tl.minimum(end, document_bound(pos.p_ends, o_own, pos))
    return first, end


@triton.jit
def query_interval(o_n, pos, MODE: tl.constexpr):
    """(first, end): the keys o_n are seen by the queries from `first` up to, but not including, `end`."""
    first = o_n - pos.offset if MODE.causal else o_n * 0
    end = o_n * 0 + pos.T
    if MODE.window:
        end = tl.minimum(end, o_n + MODE.window - pos.offset)
    if MODE.documents:
        end = tl.minimum(end, document_bound(pos.p_ends, o_n, pos) - pos.offset)
        if not MODE.causal:
            first = tl.maximum(first, document_bound(pos.p_starts, o_n, pos) - pos.offset)
    return first, end


@triton.jit
def sees_key(o_m, o_n, interval, pos, MODE: tl.constexpr):
    """Whether queries o_m (M, 1) see keys o_n (1, N): (M, N), or of a shape that broadcasts to it.

    interval  of `key_interval`, where MODE has bounds or offsets
    """
    if MODE.bounded or MODE.offsets:
        first, end = interval
        m_s = (o_n >= first[:, None]) & (o_n < end[:, None])
    elif MODE.causal:
        m_s = o_n <= o_m + pos.offset
    else:
        m_s = o_n < pos.S
    return m_s


@triton.jit
def seen_by_query(o_n, o_m, pos, MODE: tl.constexpr):
    """Whether keys o_n (N,) are seen by queries o_m (1, M): (N, M), or of a shape that broadcasts to it."""
    if MODE.bounded or MODE.offsets:
        first, end = query_interval(o_n, pos, MODE)
        end = tl.where(o_n < pos.S, end, 0)
        m_s = (o_m >= first[:, None]) & (o_m < end[:, None])
    elif MODE.causal:
        m_s = (o_n - pos.offset)[:, None] <= o_m
    else:
        m_s = (o_n < pos.S)[:, None]
    return m_s


@triton.jit
def log2_factor(scale_log2, MODE: tl.constexpr):
    """The factor from the result of `change_scores` to scores times log2(e): 1 with ALiBi, which includes it.

    The kernels take the maximum before they multiply, and the product becomes part of the exponent's subtraction.
    """
    if MODE.formula is not None:
        factor = MODE.formula.factor * LOG2_E
    elif MODE.alibi:
        factor = 1.0
    elif MODE.soft_cap is not None:
        factor = MODE.soft_cap * LOG2_E
    else:
        factor = scale_log2
    return factor


@triton.jit
def change_scores(b_s, b_tanh, b_bias, scale_log2, MODE: tl.constexpr):
    """q k^T, or tanh(s / c) with a soft cap, both without `log2_factor`; with ALiBi times its factor, plus b_bias.

    b_tanh  from `soft_cap_tanh`, where there is a soft cap
    b_bias  from `alibi_bias`, where there is ALiBi
    """
    if MODE.soft_cap is not None:
        b_s = b_tanh
    if MODE.alibi:
        b_s = b_s * (scale_log2 if MODE.soft_cap is None else MODE.soft_cap * LOG2_E) + b_bias
    return b_s
