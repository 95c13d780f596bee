"""What a warpgroup does with its scores, from the product to the weights, in the registers of the accumulator."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..score import LOG2_E, alibi_bias, change_scores, key_interval, locate, soft_cap_tanh
from .dropout import load_key
from .schedule import sees_key

ROWS = gl.constexpr(64)  # of queries: what a warpgroup multiplies at once


class Queries(NamedTuple):
    """A consumer's 64 queries from i_m, and what makes weights of their scores; zeros for what MODE lacks.

    interval    of keys that each query sees
    slope2      of ALiBi, times log2(e)
    key         dropout's counters
    """

    i_m: Any
    at: Any
    interval: Any
    scale_log2: Any
    slope2: Any
    key: Any


@gluon.jit
def load_queries(extras, numbers, i_m, i_b, i_h, sizes, LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """What belongs to the queries from i_m of query head i_h of row i_b."""
    at = locate(sizes.T, sizes.S, extras, numbers, i_b)
    interval = (0, 0)
    if MODE.bounded or MODE.offsets:
        interval = key_interval(i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), at, MODE)
    slope2 = gl.load(extras.slopes + i_h) * LOG2_E if MODE.alibi else 0.0
    key = load_key(extras.key, i_b, i_h) if MODE.threshold else 0
    return Queries(i_m, at, interval, numbers.scale_log2, slope2, key)


@gluon.jit
def finish_scores(b_s, i_n, is_cut, queries, MODE: gl.constexpr, N: gl.constexpr):
    """q k^T (ROWS, N) changed as `change_scores` says, and -inf where a query does not see a key."""
    LAYOUT: gl.constexpr = b_s.type.layout
    at, i_m, scale_log2 = queries.at, queries.i_m, queries.scale_log2
    o_m = i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    o_columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
    # ALiBi's bias of a column, whatever the tile: registers that stay. `alibi_shift` is what a tile has besides.
    b_bias = alibi_bias(queries.slope2, o_m, o_columns, i_n, i_n, at, MODE) if MODE.alibi else None
    b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
    if is_cut:
        b_s = gl.where(sees_key(o_m, i_n + o_columns, queries.interval, at, MODE), b_s, -float("inf"))
    return b_s


@gluon.jit
def alibi_shift(i_n, queries, MODE: gl.constexpr):
    """What the scores of `finish_scores` are short of in the key tile at i_n, for a bias of 0 at the first query."""
    return queries.slope2 * (i_n - queries.i_m - queries.at.offset).to(gl.float32) if MODE.alibi else 0.0


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
