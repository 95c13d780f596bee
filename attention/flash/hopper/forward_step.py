"""A consumer of the forward attends from its 64 queries: a step for each tile of keys that they see.

A step is the pair (k of a tile, v of the tile before it): the product with v is in flight while the softmax is taken.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..score import LEAST_MAXIMUM, LOG2_E, alibi_row_bias
from ..tiles import ROW_ALIGNMENT
from .forward_pipeline import release_stage, skip
from .schedule import key_tiles
from .softmax import (
    ROWS,
    alibi_shift,
    as_operand,
    exponent_factor,
    finish_scores,
    load_queries,
    n_pieces,
    rescale,
    round_weights,
    row_max,
    row_sum,
    start_scores,
    tile_max,
    tile_sum,
)

# While a row's maximum grows by less, in powers of two, the old one serves: it only guards against overflow.
GROWTH = gl.constexpr(8)


@gluon.jit
def start_outputs(
    o, b_p, i_step, i_n, queries, P_LAYOUT: gl.constexpr, buffers, BLOCKS: gl.constexpr, MODE: gl.constexpr
):
    """((o + p v in flight,), its operands p): the pieces p of the key tile at i_n, whose values came with i_step."""
    N: gl.constexpr = BLOCKS.k // n_pieces(MODE)
    operands = ()
    for j in gl.static_range(n_pieces(MODE)):
        b_p_kept = as_operand(b_p[j], i_n + j * N, queries, P_LAYOUT, buffers.q.dtype, MODE, N)
        b_v = buffers.v.index(i_step % BLOCKS.stages)
        o = warpgroup_mma(b_p_kept, b_v.slice(j * N, N), o, is_async=True)
        operands += (b_p_kept,)  # type: ignore[assignment]
    return (o,), operands


@gluon.jit
def rounded(b_p32, P_LAYOUT: gl.constexpr, dtype: gl.constexpr, MODE: gl.constexpr, N: gl.constexpr):
    """The pieces' weights, kept in 16 bits until the next step."""
    b_p = ()
    for j in gl.static_range(n_pieces(MODE)):
        b_p += (round_weights(b_p32[j], P_LAYOUT, dtype, MODE, N),)  # type: ignore[assignment]
    return b_p


@gluon.jit
def step(
    o, b_p, m, l, i_step, i_turn, i_n, is_cut, queries, keys, buffers, barriers,
    c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """o += p v of the tile before, during the scores and the softmax of the key tile at i_n: (o, p, m, l) after it.

    p comes in pieces of N keys each, of which there are several only where a row's maximum is known in advance. The
    keys of this step have arrived when it starts, and those of the next when it ends.
    """
    BN: gl.constexpr = BLOCKS.k
    PIECES: gl.constexpr = n_pieces(MODE)
    N: gl.constexpr = BN // PIECES
    STAGES: gl.constexpr = BLOCKS.stages
    S_LAYOUT: gl.constexpr = m.type.layout.parent
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    dtype: gl.constexpr = buffers.q.dtype
    factor = exponent_factor(queries.scale_log2, MODE)
    i_s = i_step % STAGES

    if BLOCKS.in_turn:
        mbarrier.wait(barriers.turn.index(c), i_turn & 1)
    s_flight = start_scores(buffers.k.index(i_s), queries, buffers, S_LAYOUT, MODE, N)
    # Draws a mask while the scores are computed.
    o_flight, operands = start_outputs(o, b_p, i_step, i_n + BN, queries, P_LAYOUT, buffers, BLOCKS, MODE)

    # (ROWS,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    m_safe = m
    b_p32 = ()
    for j in gl.static_range(PIECES):
        b_s = warpgroup_mma_wait(2 * PIECES - 1 - j, deps=(s_flight[j],))
        if BLOCKS.in_turn and j == PIECES - 1:
            mbarrier.arrive(barriers.turn.index((c + 1) % BLOCKS.consumers))
        b_s = finish_scores(b_s, i_n + j * N, is_cut, queries, MODE, N)
        shift = alibi_shift(i_n, queries, MODE)
        if not MODE.fixed_max:
            m_new = gl.convert_layout(row_max(b_s, N, BLOCKS), m.type.layout) * factor + shift
            m_new = gl.where(m_new - m > GROWTH, m_new, m)
            m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
            alpha = gl.where(m_new == m, 1.0, gl.exp2(m - m_safe))
            l = l * gl.convert_layout(alpha, L_ROWS)[:, None]
            m = m_new
        # (ROWS, N) l is summed before anything is dropped.
        b_p32 += (gl.exp2(b_s * factor - (m_safe - shift)[:, None]),)  # type: ignore[assignment]
        l += row_sum(b_p32[j], N)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    mbarrier.wait(barriers.kv_full.index((i_step + 1) % STAGES), ((i_step + 1) // STAGES) & 1)
    o = warpgroup_mma_wait(0, deps=o_flight + operands)[0]
    release_stage(i_step, keys, buffers, barriers, BLOCKS)
    if not MODE.fixed_max:
        o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    return o, rounded(b_p32, P_LAYOUT, dtype, MODE, N), m, l


@gluon.jit
def attend(
    out, p_lse, p_lse2, inputs, scalars, keys, buffers, barriers, sizes,
    i_m_all, i_b, i_h, i_q, phase, i_step, i_turn, c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """out and lse of consumer c's 64 queries of the tile from i_m_all: (i_step, i_turn) after it.

    keys: where this consumer fetches them itself, else None.
    """
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    THRESHOLD: gl.constexpr = MODE.threshold
    KEEP_SCALE: gl.constexpr = 256 / (256 - THRESHOLD)
    PIECES: gl.constexpr = n_pieces(MODE)
    N: gl.constexpr = BN // PIECES
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = out.dtype
    T = sizes.T
    factor = exponent_factor(scalars.scale_log2, MODE)

    i_bh = i_b * sizes.H + i_h
    i_m = i_m_all + c * ROWS
    queries = load_queries(buffers.q.index(i_q), inputs, scalars, i_m, i_b, i_h, sizes, S_LAYOUT, MODE)
    pos = queries.pos
    n_start_all, _, _, n_end_all = key_tiles(i_m_all, pos, CONSUMERS * ROWS, BN, MODE)
    n_start, n_full_start, n_full_end, n_end = key_tiles(i_m, pos, ROWS, BN, MODE)
    if CONSUMERS > 1:
        i_step, i_turn = skip(i_step, i_turn, n_end_all - n_end, barriers, c, BLOCKS)

    # The last tile that these queries see. The diagonal cuts it, or the end of a sequence that does not fill it.
    i_n = (n_end - 1) * BN
    is_cut = True
    # With other numbers of consumers, and with dropout, this would spill.
    if CONSUMERS == 2 and not (MODE.threshold or MODE.causal or MODE.bounded or MODE.offsets):
        is_cut = i_n + BN > sizes.S
    mbarrier.wait(barriers.q_full.index(i_q), phase)
    mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)
    s_flight = start_scores(buffers.k.index(i_step % STAGES), queries, buffers, S_LAYOUT, MODE, N)
    b_s = ()
    for j in gl.static_range(PIECES):
        b_s += (warpgroup_mma_wait(0, deps=(s_flight[j],)),)  # type: ignore[assignment]
    release_stage(i_step, keys, buffers, barriers, BLOCKS)
    scores = ()
    for j in gl.static_range(PIECES):
        scores += (finish_scores(b_s[j], i_n + j * N, is_cut, queries, MODE, N),)  # type: ignore[assignment]
    shift = alibi_shift(i_n, queries, MODE)
    m = gl.convert_layout(tile_max(scores, N, BLOCKS, MODE), S_ROWS) * factor + shift
    if MODE.fixed_max:  # this tile's serves for all: rows with few keys keep the largest weight, 1, unrounded
        m = gl.maximum(m, LEAST_MAXIMUM)
    o_m = i_m + gl.arange(0, ROWS, S_ROWS)
    b_row_bias = alibi_row_bias(queries.slope2, o_m, i_m + pos.offset, pos, MODE) if MODE.alibi else 0.0
    if MODE.sinks:  # as if a key without a value had been seen before all others
        m_sink = gl.load(inputs.sinks + i_h) * LOG2_E + b_row_bias
        m = gl.maximum(m, m_sink)
    m_safe = gl.where(m == -float("inf"), 0.0, m)
    b_p32 = ()
    for j in gl.static_range(PIECES):
        b_p32 += (gl.exp2(scores[j] * factor - (m_safe - shift)[:, None]),)  # type: ignore[assignment]
    l = tile_sum(b_p32, N, MODE)
    if MODE.sinks:  # a quarter for each of a row's four threads
        l += gl.convert_layout(0.25 * gl.exp2(m_sink - m_safe), gl.SliceLayout(1, l.type.layout))[:, None]
    b_p = rounded(b_p32, P_LAYOUT, dtype, MODE, N)
    o = gl.zeros([ROWS, BD], gl.float32, O_LAYOUT)
    i_step += 1
    mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)

    for j in range(n_start + 1, n_end):
        i_tile_n = n_end - 1 + n_start - j
        if MODE.bounded:
            is_cut = (i_tile_n >= n_full_end) | (i_tile_n < n_full_start)
        else:  # the end of the sequence cuts the last tile alone
            is_cut = i_tile_n >= n_full_end if MODE.causal else False
        o, b_p, m, l = step(
            o, b_p, m, l, i_step, i_turn, i_tile_n * BN, is_cut, queries, keys, buffers, barriers, c, BLOCKS, MODE
        )
        i_step += 1
        i_turn += 1

    o_flight, operands = start_outputs(o, b_p, i_step, n_start * BN, queries, P_LAYOUT, buffers, BLOCKS, MODE)
    if not BLOCKS.out_in_q:
        mbarrier.arrive(barriers.q_empty.index(i_q))
    l_row = gl.convert_layout(gl.sum(l, 1), S_ROWS)
    lse2 = m + gl.log2(l_row) - b_row_bias
    o = warpgroup_mma_wait(0, deps=o_flight + operands)[0]
    if CONSUMERS > 1:
        release_stage(i_step, keys, buffers, barriers, BLOCKS)
        i_step, i_turn = skip(i_step + 1, i_turn, n_start - n_start_all, barriers, c, BLOCKS)

    # Kept weights are rescaled once, here, by the inverse of the keep probability.
    o = o * gl.convert_layout(KEEP_SCALE / l_row, O_ROWS)[:, None]
    # Rows that see nothing are zero; l = 0 tells less, as scores of -inf give it too.
    if MODE.bounded or MODE.offsets:
        first, end = queries.interval
        o = gl.where((gl.convert_layout(first, O_ROWS) < gl.convert_layout(end, O_ROWS))[:, None], o, 0.0)
    elif MODE.causal:
        o = gl.where((i_m + gl.arange(0, ROWS, O_ROWS) >= T - sizes.S)[:, None], o, 0.0)
    b_out = buffers.out.index(c)
    tma.store_wait(0)
    b_out.store(o.to(dtype))
    fence_async_shared()
    b_out = b_out._reinterpret(dtype, [1, 1, ROWS, BD], out.layout)
    tma.async_copy_shared_to_global(out, [i_b, i_h, i_m, 0], b_out)
    if BLOCKS.out_in_q and CONSUMERS > 1:
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(i_q))
    # As the plain forward: lse2 for the backward, +inf for a row that saw nothing.
    gl.store(p_lse + i_bh.to(gl.int64) * T + o_m, lse2 / LOG2_E, mask=o_m < T)
    lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)
    T_padded = gl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
    gl.store(p_lse2 + i_bh.to(gl.int64) * T_padded + o_m, lse2, mask=o_m < T_padded)
    return i_step, i_turn
