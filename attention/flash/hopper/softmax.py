"""The softmax of a warpgroup: from its scores to weights, in the registers of the accumulator."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ...scores.alibi import alibi_bias, alibi_row_bias
from ...scores.soft_cap import soft_cap_tanh
from ..formula import Place
from ..score import (
    LOG2_E,
    change_scores,
    key_interval,
    locate,
    log2_factor,
    sees_key,
)
from .added import PARTS, far_number, is_near, near_numbers, pair_numbers
from .masks import as_bits, drop, hide, load_key

ROWS = gl.constexpr(64)  # of queries that a warpgroup multiplies in one instruction
# While a row's maximum grows by less, in powers of two, the old one serves: it only guards against overflow.
GROWTH = gl.constexpr(8)
STEEP = gl.constexpr(40)  # ForwardBlocks.optimistic where rows are steep


class Queries(NamedTuple):
    """A consumer's 64 queries from i_m, and the values that turn scores into weights; zero for features not in MODE.

    b_q         in shared memory
    interval    of keys that each query sees, where it takes loads or the mask is not `as_bits`
    slope2      of ALiBi, times log2(e)
    slopes      slope2 as an operand, where ALiBi's biases come with the product
    key         dropout's counters
    formula     a Terms
    added       an Added
    """

    b_q: Any
    i_m: Any
    pos: Any
    interval: Any
    scale_log2: Any
    slope2: Any
    slopes: Any
    key: Any
    formula: Any
    added: Any


class Added(NamedTuple):
    """The values x that a formula adds to the scores of one head, see added.py; `far` is for the furthest pairs."""

    x: Any
    i_b: Any
    i_h: Any
    far: Any


class Terms(NamedTuple):
    """What a formula's scores are computed from, for the queries of one consumer."""

    inputs: Any
    scale: Any
    i_b: Any
    i_h: Any
    head: Any
    row: Any


@gluon.jit
def load_queries(b_q, program, i_m, i_b, i_h, LAYOUT: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The `Queries` from i_m of query head i_h of sequence i_b."""
    inputs, scalars, sizes = program.inputs, program.scalars, program.sizes
    pos = locate(sizes.T, sizes.S, inputs, scalars, i_b, i_b * sizes.H + i_h, 1)
    interval = (0, 0)
    if MODE.documents or ((MODE.bounded or MODE.offsets) and not as_bits(BLOCKS, MODE)):
        interval = key_interval(i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), pos, MODE)
    slope2 = gl.load(inputs.slopes + i_h) * LOG2_E if MODE.alibi else 0.0
    key = load_key(inputs.key, i_b, i_h) if MODE.threshold else 0
    slopes = 0
    if bias_in_product(MODE.alibi, MODE.soft_cap):
        slopes = split_slope(slope2 / scalars.scale_log2, gl.DotOperandLayout(0, LAYOUT, 2))
    formula = 0
    if MODE.formula is not None and not MODE.biased:
        o_m = i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        head = MODE.formula.head(inputs.formula, i_b, i_h)
        row = MODE.formula.row(inputs.formula, i_b, i_h, o_m, sizes.T)
        formula = Terms(inputs.formula, scalars.scale, i_b, i_h, head, row)  # type: ignore[assignment]
    added = 0
    if MODE.added is not None:
        added = Added(inputs.formula[0], i_b, i_h, far_number(inputs, i_b, i_h, MODE))  # type: ignore[assignment]
    return Queries(b_q, i_m, pos, interval, scalars.scale_log2, slope2, slopes, key, formula, added)


@gluon.constexpr_function
def bias_in_product(ALIBI, SOFT_CAP):
    """Whether ALiBi's biases come with the product q k^T: unless a soft cap comes between the two."""
    return ALIBI and SOFT_CAP is None


@gluon.constexpr_function
def in_product(ALIBI, SOFT_CAP, BIASED):
    """Whether all that changes the scores comes with the product q k^T."""
    return BIASED or (ALIBI and SOFT_CAP is None)


@gluon.jit
def split_slope(x, LAYOUT: gl.constexpr):
    """x in each row of (ROWS, PARTS), as the sum of three bf16 values: with `column_numbers`, x n in fp32."""
    high = x.to(gl.bfloat16).to(gl.float32)
    middle = (x - high).to(gl.bfloat16).to(gl.float32)
    o_c = gl.zeros([ROWS, 1], gl.int32, LAYOUT) + gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))[None, :]
    parts = gl.where(o_c == 0, high, gl.where(o_c == 1, middle, gl.where(o_c == 2, x - high - middle, 0.0)))
    return parts.to(gl.bfloat16)


@gluon.jit
def column_numbers(N: gl.constexpr, LAYOUT: gl.constexpr):
    """n in each row n of (N, PARTS): exact in bf16, as N is at most 256."""
    o_n = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))[:, None] + gl.zeros([1, PARTS], gl.int32, LAYOUT)
    return o_n.to(gl.float32).to(gl.bfloat16)


@gluon.constexpr_function
def n_pieces(MODE):
    """The pieces of a key tile. The softmax of one, where its maximum is known, runs during the product of the next.

    With dropout the product waits for the mask, and pieces take longer.
    """
    return 2 if MODE.fixed_max and MODE.columns == 128 and not MODE.threshold else 1


@gluon.jit
def load_added(i_n, queries, BN: gl.constexpr, LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """(ROWS, BN): the values that a formula adds to the scores of the keys from i_n; 0 where it has none of pairs."""
    numbers = 0.0
    if MODE.added == "pair":
        a = queries.added
        o_m = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
        o_n = gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))[None, :]
        numbers = pair_numbers(a.x, a.i_b, a.i_h, queries.i_m, gl.maximum(i_n, 0), o_m, o_n)
    return numbers


@gluon.jit
def start_scores(i_s, numbers, queries, buffers, LAYOUT: gl.constexpr, MODE: gl.constexpr, N: gl.constexpr):
    """In flight: q k^T (ROWS, N) for each piece of the key tile in stage i_s, with the additions to it: ALiBi's biases,
    or the values that a formula adds for keys, or those of pairs, `numbers` of `load_added`."""
    b_k = buffers.k.index(i_s)
    s_flight = ()
    for j in gl.static_range(n_pieces(MODE)):
        b_columns = b_k.slice(j * N, N).permute((1, 0))
        s_piece = gl.zeros([ROWS, N], gl.float32, LAYOUT)
        if bias_in_product(MODE.alibi, MODE.soft_cap):
            b_numbers = buffers.columns.permute((1, 0))
            s_piece = warpgroup_mma(queries.slopes, b_numbers, s_piece, use_acc=False, is_async=True)
            s_piece = warpgroup_mma(queries.b_q, b_columns, s_piece, is_async=True)
        elif MODE.biased:
            b_parts = buffers.parts.index(i_s).permute((1, 0))
            s_piece = warpgroup_mma(buffers.columns, b_parts, s_piece, use_acc=False, is_async=True)
            s_piece = warpgroup_mma(queries.b_q, b_columns, s_piece, is_async=True)
        elif MODE.added == "pair":
            s_piece = numbers * (LOG2_E / queries.scale_log2)
            s_piece = warpgroup_mma(queries.b_q, b_columns, s_piece, is_async=True)
        else:
            s_piece = warpgroup_mma(queries.b_q, b_columns, s_piece, use_acc=False, is_async=True)
        s_flight += (s_piece,)  # type: ignore[assignment]
    return s_flight


@gluon.jit
def finish_scores(b_s, i_n, is_cut, queries, N: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """q k^T (ROWS, N) after `change_scores`, and -inf where a query does not see a key."""
    LAYOUT: gl.constexpr = b_s.type.layout
    pos, i_m, scale_log2 = queries.pos, queries.i_m, queries.scale_log2
    o_m = i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    o_columns = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))[None, :]
    if MODE.formula is not None and not MODE.biased:
        f = queries.formula
        place = Place(f.i_b, f.i_h, o_m, i_n + o_columns, pos)
        column = MODE.formula.column(f.inputs, f.i_b, f.i_h, i_n, o_columns, None)
        b_s = MODE.formula.value(b_s, f.scale, f.head, f.row, column, f.inputs, place, False)
    elif not in_product(MODE.alibi, MODE.soft_cap, MODE.biased):  # else the product has left the changed scores
        b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
        # ALiBi's bias of a column is the same in every tile and stays in registers; `tile_shift` is the bias of a tile.
        b_bias = alibi_bias(queries.slope2, o_m, o_columns, i_n, i_n, pos, MODE) if MODE.alibi else None
        b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
    if MODE.added == "distance":
        a = queries.added
        if is_near(a.x, i_m, i_n, N, pos):
            o_rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
            b_numbers = near_numbers(a.x, a.i_b, a.i_h, i_m, i_n, o_rows, N - 1 - o_columns, N, pos)
            b_s += b_numbers * (LOG2_E / scale_log2)
    if is_cut:
        if as_bits(BLOCKS, MODE):
            b_s = hide(b_s, i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), i_n, queries.interval, pos, MODE)
        else:
            b_s = gl.where(sees_key(o_m, i_n + o_columns, queries.interval, pos, MODE), b_s, -float("inf"))
    return b_s


@gluon.jit
def exponent_factor(scale_log2, MODE: gl.constexpr):
    """The factor that turns the result of `finish_scores` into scores times log2(e)."""
    return scale_log2 if in_product(MODE.alibi, MODE.soft_cap, MODE.biased) else log2_factor(scale_log2, MODE)


@gluon.jit
def tile_shift(i_n, queries, BN: gl.constexpr, MODE: gl.constexpr):
    """The term, in base 2, that `finish_scores` leaves out in the key tile at i_n.

    With ALiBi, for a bias of 0 at the first query; of a formula's values for each distance, that of the furthest.
    """
    shift = 0.0
    if MODE.alibi:
        shift = queries.slope2 * (i_n - queries.i_m - queries.pos.offset).to(gl.float32)
    elif MODE.added == "distance":
        a = queries.added
        shift = gl.where(is_near(a.x, queries.i_m, i_n, BN, queries.pos), 0.0, a.far)
    return shift


@gluon.jit
def row_bias(o_m, queries, MODE: gl.constexpr):
    """ALiBi's term of each query o_m, relative to the first one; 0 without ALiBi."""
    return (
        alibi_row_bias(queries.slope2, o_m, queries.i_m + queries.pos.offset, queries.pos, MODE) if MODE.alibi else 0.0
    )


@gluon.jit
def new_maximum(m, m_tile, GROWTH: gl.constexpr):
    """(m, m without -inf, the factor of l and o) of each row after a tile whose maximum is m_tile.

    A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    """
    m_new = gl.where(m_tile - m > GROWTH, m_tile, m)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.where(m_new == m, 1.0, gl.exp2(m - m_safe))
    return m_new, m_safe, alpha


@gluon.jit
def row_max(b_s, N: gl.constexpr, BLOCKS: gl.constexpr):
    """The maximum of each row. Two consumers have the registers to follow several chains of maxima at once."""
    if BLOCKS.consumers == 2:
        b_s = gl.max(gl.max(b_s.reshape([ROWS, N // 32, 4, 8]), 1), 1)
    return gl.max(b_s, 1)


@gluon.jit
def row_sum(b_p, N: gl.constexpr):
    """(ROWS, 4): the sum of the values in each of a row's four threads. The four sums are added once, at the end."""
    return gl.sum(gl.sum(b_p.reshape([ROWS, N // 8, 4, 2]), 1), 2)


@gluon.constexpr_function
def are_small_asm(n):
    """PTX for the sums of a thread's two rows: 1 where all sums of its warp are 2^n at most, else 0. NaN is not."""
    largest = f"0f{(127 + n) << 23:08x}"
    return f"""{{
        .reg .pred p;
        setp.le.f32 p, $2, {largest};
        setp.le.and.f32 p, $3, {largest}, p;
        vote.sync.all.pred p, p, 0xffffffff;
        selp.b32 $0, 1, 0, p;
        mov.b32 $1, $0;
        }}"""


@gluon.jit
def are_small(l_tile, votes, N: gl.constexpr):
    """Whether no sum of `row_sum` is above 2^N: for all threads of a consumer, by way of shared memory.

    votes: (4, 32), one of each thread
    """
    ASM: gl.constexpr = are_small_asm(N)
    OF_WARPS: gl.constexpr = gl.DistributedLinearLayout([[1, 0], [2, 0]], [[0, 0]] * 5, [[0, 0]] * 2, [], [4, 1])
    vote = gl.inline_asm_elementwise(ASM, "=r,=r,f,f", [l_tile], dtype=gl.int32, is_pure=False, pack=2)
    votes.store(gl.max(vote.reshape([4, 2, 8, 4]), 1).reshape([4, 32]))
    return gl.min(gl.min(votes.slice(0, 1, dim=1).load(OF_WARPS), 0), 0) != 0


@gluon.jit
def tile_max(scores, N: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The maximum of each row over all pieces of a tile."""
    m = row_max(scores[0], N, BLOCKS)
    for j in gl.static_range(1, n_pieces(MODE)):
        m = gl.maximum(m, row_max(scores[j], N, BLOCKS))
    return m


@gluon.jit
def tile_sum(b_p, N: gl.constexpr, MODE: gl.constexpr):
    """`row_sum` over all pieces of a tile."""
    l = row_sum(b_p[0], N)
    for j in gl.static_range(1, n_pieces(MODE)):
        l += row_sum(b_p[j], N)
    return l


@gluon.jit
def weights(b_s, factor, m, OPTIMISTIC: gl.constexpr):
    """The weights of scores, for each row's maximum m.

    Where rows are steep, one weight may be large and not 1. It is cut to bf16 before it is summed, so that its row is
    still that key's value; the factor 2^(1/256) makes up for what cuts take on average.
    """
    if OPTIMISTIC == STEEP:
        b_p = gl.exp2(b_s * factor - (m - 1 / 256)[:, None]).to(gl.int32, bitcast=True)
        b_p = (b_p & -65536).to(gl.float32, bitcast=True)
    else:
        b_p = gl.exp2(b_s * factor - m[:, None])
    return b_p


@gluon.constexpr_function
def in_words(MODE):
    """Whether weights stay packed from one step to the next, two 16-bit values in an int32.

    At head size 64 ptxas swaps the halves of pairs of 16-bit values that live through a loop, in every step. `drop`
    works on words anyway; the full mask has no registers to spare for it.
    """
    return MODE.columns == 64 and MODE.causal and not MODE.threshold


@gluon.jit
def round_weights(b_p32, P_LAYOUT: gl.constexpr, dtype: gl.constexpr, MODE: gl.constexpr, N: gl.constexpr):
    """Weights (ROWS, N) in 16 bits, for `as_operand`."""
    if in_words(MODE):
        ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
        low, high = gl.split(b_p32.reshape([ROWS, N // 2, 2]))
        b_p = gl.inline_asm_elementwise(ASM, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    else:
        b_p = gl.convert_layout(b_p32.to(dtype), P_LAYOUT)
    return b_p


@gluon.jit
def as_operand(b_p, i_n, queries, P_LAYOUT: gl.constexpr, dtype: gl.constexpr, MODE: gl.constexpr, N: gl.constexpr):
    """The result of `round_weights` for the product with the values from i_n, less the weights that dropout drops."""
    THRESHOLD: gl.constexpr = MODE.threshold
    if in_words(MODE):
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [b_p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        b_p = gl.convert_layout(gl.join(low, high).reshape([ROWS, N]).to(dtype, bitcast=True), P_LAYOUT)
    if THRESHOLD:
        b_p = drop(b_p, queries.key, queries.i_m, i_n, THRESHOLD, ROWS, N)
    return b_p


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
