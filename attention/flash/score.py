"""Who sees whom and how scores are changed, in Triton: what attention/score.py says in torch, for tiles of a kernel.

    seen_keys, seeing_queries       the tiles to visit, and which of them need no mask
    key_interval, query_interval    the keys a query sees and the queries that see a key, always an interval
    change_scores                   soft cap, then ALiBi; scores in base 2
    change_gradient                 its derivative

A query i stands at the key i + offset, its own: S - T unless the layout says otherwise.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..gpu import INTERPRET

LOG2_E = tl.constexpr(1.4426950408889634)


class Positions(NamedTuple):
    """Where T queries and S keys of one row stand, and the bounds of its documents by position, if it has any."""

    T: Any
    S: Any
    offset: Any
    k_start: Any
    p_starts: Any
    p_ends: Any
    length: Any  # of the documents' row


@triton.jit
def locate(T, S, q_start, k_start, length, extras, i_b):
    """The positions of row i_b. q_start and k_start are None where the last query stands at the last key."""
    offset = S - T if q_start is None else q_start - k_start
    k_start = 0 if k_start is None else k_start
    if extras.starts is None:  # zeros for what is not there: in Triton 3.6 no function returns a tuple with None in it
        at = Positions(T, S, offset, k_start, 0, 0, 0)
    else:
        o_row = tl.cast(i_b, tl.int64) * length
        at = Positions(T, S, offset, k_start, extras.starts + o_row, extras.ends + o_row, length)
    return at


@triton.jit
def document_bound(p_bounds, o_own, at):
    """The start or end of the documents at keys o_own, as numbers of keys; 0 - k_start outside of the row."""
    o_position = o_own + at.k_start
    return tl.load(p_bounds + o_position, mask=(o_position >= 0) & (o_position < at.length), other=0) - at.k_start


@triton.jit
def seen_keys(i_m, at, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(n_start, n_whole, n_full, n_end): key tiles from n_start to n_end are seen by one of the queries from i_m.

    All of them see all keys from n_whole to n_full; the other tiles are cut by the diagonal, a window, a document's
    bounds or the end of the sequence. n_start, n_whole and n_full are multiples of BLOCKS.k.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    S = at.S
    if MODE.causal:
        n_full = tl.minimum(tl.maximum(i_m + 1 + at.offset, 0), S) // BN * BN
        n_end = tl.minimum(tl.maximum(i_m + BM + at.offset, 0), S)
    else:
        n_full = S // BN * BN
        n_end = S
    n_start = 0
    n_whole = 0
    if MODE.bounded:
        own = i_m + at.offset
        if MODE.window:
            n_start = own - (MODE.window - 1)
            n_whole = own + BM - MODE.window
        if MODE.documents:
            own_last = tl.minimum(own + BM, at.T + at.offset) - 1
            n_start = tl.maximum(n_start, document_bound(at.p_starts, own, at))
            n_whole = tl.maximum(n_whole, document_bound(at.p_starts, own_last, at))
            if not MODE.causal:
                n_full = tl.minimum(n_full, tl.maximum(document_bound(at.p_ends, own, at), 0) // BN * BN)
                n_end = tl.minimum(n_end, document_bound(at.p_ends, own_last, at))
        n_start = tl.maximum(n_start, 0) // BN * BN
        n_whole = tl.cdiv(tl.maximum(n_whole, 0), BN) * BN
    return n_start, n_whole, n_full, n_end


@triton.jit
def seeing_queries(i_n, at, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """(m_start, m_full, m_cut, m_end): query tiles from m_start to m_end see one of the keys from i_n.

    Those from m_full that end by m_cut see all of them. m_start and m_full are multiples of BLOCKS.q.
    """
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    T = at.T
    m_start = 0
    m_full = 0
    m_cut = T
    m_end = T
    if MODE.causal:
        m_start = tl.maximum(i_n - at.offset, 0) // BM * BM
        m_full = tl.minimum(tl.cdiv(tl.maximum(i_n + BN - 1 - at.offset, 0), BM) * BM, tl.cdiv(T, BM) * BM)
    if MODE.bounded:
        m_cut = tl.cdiv(T, BM) * BM
        i_last = tl.minimum(i_n + BN, at.S) - 1
        if MODE.window:
            m_cut = tl.minimum(m_cut, i_n + MODE.window - at.offset)
            m_end = tl.minimum(m_end, i_last + MODE.window - at.offset)
        if MODE.documents:
            m_cut = tl.minimum(m_cut, document_bound(at.p_ends, i_n, at) - at.offset)
            m_end = tl.minimum(m_end, document_bound(at.p_ends, i_last, at) - at.offset)
            if not MODE.causal:
                m_start = tl.maximum(document_bound(at.p_starts, i_n, at) - at.offset, 0) // BM * BM
                m_full = tl.cdiv(tl.maximum(document_bound(at.p_starts, i_last, at) - at.offset, 0), BM) * BM
    return m_start, m_full, m_cut, m_end


@triton.jit
def key_interval(o_m, at, MODE: tl.constexpr):
    """(first, end): the queries o_m see the keys from `first` up to, but not including, `end`."""
    o_own = o_m + at.offset
    first = tl.zeros_like(o_own)
    end = tl.minimum(o_own + 1, at.S) if MODE.causal else tl.zeros_like(o_own) + at.S
    if MODE.window:
        first = tl.maximum(first, o_own - (MODE.window - 1))
    if MODE.documents:
        first = tl.maximum(first, document_bound(at.p_starts, o_own, at))
        if not MODE.causal:
            end = tl.minimum(end, document_bound(at.p_ends, o_own, at))
    return first, end


@triton.jit
def query_interval(o_n, at, MODE: tl.constexpr):
    """(first, end): the keys o_n are seen by the queries from `first` up to, but not including, `end`."""
    first = o_n - at.offset if MODE.causal else tl.zeros_like(o_n)
    end = tl.zeros_like(o_n) + at.T
    if MODE.window:
        end = tl.minimum(end, o_n + MODE.window - at.offset)
    if MODE.documents:
        end = tl.minimum(end, document_bound(at.p_ends, o_n, at) - at.offset)
        if not MODE.causal:
            first = tl.maximum(first, document_bound(at.p_starts, o_n, at) - at.offset)
    return first, end


@triton.jit
def base_2(scale_log2, MODE: tl.constexpr):
    """What takes the scores of `change_scores` to base 2: what scales them, or 1 where it is in them already."""
    if MODE.alibi:
        unit = 1.0
    elif MODE.soft_cap is not None:
        unit = MODE.soft_cap * LOG2_E
    else:
        unit = scale_log2
    return unit


@triton.jit
def change_scores(b_s, b_tanh, b_bias, scale_log2, MODE: tl.constexpr):
    """q k^T, or tanh(s / c) with a soft cap, both short of `base_2`; or with ALiBi all of that and b_bias.

    b_tanh  from `soft_cap_tanh`, where there is a soft cap
    b_bias  from `alibi_bias`, where there is ALiBi
    """
    if MODE.soft_cap is not None:
        b_s = b_tanh
    if MODE.alibi:
        b_s = b_s * (scale_log2 if MODE.soft_cap is None else MODE.soft_cap * LOG2_E) + b_bias
    return b_s


@triton.jit
def change_gradient(b_ds, b_tanh, MODE: tl.constexpr):
    """The gradient of s = scale q k^T from that of the changed scores: times 1 - tanh(s / c)^2 where there is a cap."""
    if MODE.soft_cap is not None:
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    return b_ds


@triton.jit
def alibi_bias(slope2, o_m, o_n, i_n, i_frame, at, MODE: tl.constexpr):
    """log2(e) times -slope (i - j), for slope2 = log2(e) slope, queries o_m and the keys i_n + o_n.

    o_m and o_n have shapes that broadcast to the tile's. In 16 bits the bias is that of a query at i_frame for all, one
    number a column where the whole would be one a score: `alibi_frame` is what queries have besides.
    """
    if MODE.exact:
        b_bias = slope2 * (i_n + o_n - (o_m + at.offset)).to(tl.float32)
    else:
        b_bias = slope2 * o_n.to(tl.float32) + slope2 * (i_n - i_frame).to(tl.float32)
    return b_bias


@triton.jit
def alibi_frame(slope2, o_m, i_frame, at, MODE: tl.constexpr):
    """What `alibi_bias` is short of, of every score of the queries o_m: to subtract from their log-sum-exp."""
    return 0.0 if MODE.exact else slope2 * (o_m + at.offset - i_frame).to(tl.float32)


@triton.jit
def soft_cap_tanh(b_s, scale_log2, MODE: tl.constexpr):
    """tanh(s / c) of a soft cap, for s = scale q k^T."""
    b_x = b_s * (scale_log2 / (MODE.soft_cap * LOG2_E))
    if INTERPRET or MODE.exact:
        b_tanh = tanh(b_x)
    else:  # off by 2^-11 of itself, where bf16 is off by 2^-9
        asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
        b_tanh = tl.inline_asm_elementwise(asm, "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    return b_tanh


@triton.jit
def tanh(x):
    """tanh in fp32, to within a few roundings (Moshier's Cephes, tanhf)."""
    z = x * x
    poly = -5.70498872745e-3 * z + 2.06390887954e-2
    poly = poly * z - 5.37397155531e-2
    poly = poly * z + 1.33314422036e-1
    poly = poly * z - 3.33332819422e-1
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, poly * z * x + x, tl.where(x < 0, -far, far))
