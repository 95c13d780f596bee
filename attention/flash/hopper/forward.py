"""The forward kernel on Hopper: the plain forward's algorithm, with its products beside its softmax.

The warps of a program have roles. A producer, one warp, has the copy engine bring tiles of q, k and v; each consumer, a
warpgroup, has 64 queries of its own and walks over the key tiles that they see, the last first:

    producer      k_5      k_4, v_5                       k_3, v_4                       k_2, v_3
    tensor core   q k_5^T  q k_4^T,  o += p_5 v_5         q k_3^T,  o += p_4 v_4         ...
    consumer               p_5       p_4 = softmax(...)             p_3 = softmax(...)

A step of the pipeline is the pair (k of a tile, v of the tile before it): while a consumer takes the softmax of its
scores, its product with v is in flight, and so are the products of the other consumers. Programs stay on their
multiprocessor and take the next tile of queries from a counter, the longest rows first.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..configs import Extras, Options
from ..forward import without_keys
from ..score import LEAST_MAXIMUM, LOG2_E, alibi_row_bias
from ..tiles import ROW_ALIGNMENT, head_group_size, kernel_mode, launch_numbers, rows_like
from .configs import ForwardBlocks
from .forward_pipeline import allocate, next_queries, producer, q_stage, skip
from .schedule import Sizes, key_tiles
from .softmax import (
    ROWS,
    alibi_shift,
    as_operand,
    exponent_factor,
    finish_scores,
    load_queries,
    rescale,
    round_weights,
    row_max,
    row_sum,
    start_scores,
)
from .tiles import tiles

# While a row's maximum grows by less, in powers of two, the old one serves: it only guards against overflow.
GROWTH = gl.constexpr(8)


@gluon.jit
def step(
    o, b_p, m, l, i_step, i_turn, i_n, is_cut, queries, buffers, barriers,
    c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """o += p v of the tile before, beside the scores and the softmax of the key tile at i_n: (o, p, m, l) after it.

    The keys of this step have arrived when it starts, and those of the next when it ends.
    """
    BN: gl.constexpr = BLOCKS.k
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
    s_flight = start_scores(buffers.k.index(i_s), queries, buffers, S_LAYOUT, MODE, BN)
    b_p = as_operand(b_p, i_n + BN, queries, P_LAYOUT, dtype, MODE, BN)  # draws a mask while the scores are computed
    o_flight = warpgroup_mma(b_p, buffers.v.index(i_s), o, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(s_flight,))
    if BLOCKS.in_turn:
        mbarrier.arrive(barriers.turn.index((c + 1) % BLOCKS.consumers))
    b_s = finish_scores(b_s, i_n, is_cut, queries, MODE, BN)
    shift = alibi_shift(i_n, queries, MODE)

    # (ROWS,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    m_safe = m
    if not MODE.fixed_max:
        m_new = gl.convert_layout(row_max(b_s, BN, BLOCKS), m.type.layout) * factor + shift
        m_new = gl.where(m_new - m > GROWTH, m_new, m)
        m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = gl.where(m_new == m, 1.0, gl.exp2(m - m_safe))
        l = l * gl.convert_layout(alpha, L_ROWS)[:, None]
        m = m_new

    # (ROWS, BN) l is summed before anything is dropped.
    b_p32 = gl.exp2(b_s * factor - (m_safe - shift)[:, None])
    l += row_sum(b_p32, BN)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    mbarrier.wait(barriers.kv_full.index((i_step + 1) % STAGES), ((i_step + 1) // STAGES) & 1)
    o, b_p = warpgroup_mma_wait(0, deps=(o_flight, b_p))
    mbarrier.arrive(barriers.kv_empty.index(i_s))
    if not MODE.fixed_max:
        o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    b_p = round_weights(b_p32, P_LAYOUT, dtype, MODE, BN)
    return o, b_p, m, l


@gluon.jit
def consumer(
    out, p_lse, p_lse2, extras, numbers, buffers, barriers, sizes,
    c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Four warps: out and lse of 64 queries of each tile that the producer hands out."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    THRESHOLD: gl.constexpr = MODE.threshold
    KEEP_SCALE: gl.constexpr = 256 / (256 - THRESHOLD)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    dtype: gl.constexpr = out.dtype
    T = sizes.T
    factor = exponent_factor(numbers.scale_log2, MODE)

    i_step = 0
    i_turn = 0
    i_round = 0
    i_q, phase = q_stage(i_round, c, BLOCKS)
    i_m_all, i_b, i_h = next_queries(i_q, phase, buffers, barriers)
    while i_h >= 0:
        i_bh = i_b * sizes.H + i_h
        i_m = i_m_all + c * ROWS
        queries = load_queries(buffers.q.index(i_q), extras, numbers, i_m, i_b, i_h, sizes, S_LAYOUT, MODE)
        at = queries.at
        n_start_all, _, _, n_end_all = key_tiles(i_m_all, at, CONSUMERS * ROWS, BN, MODE)
        n_start, n_full_start, n_full_end, n_end = key_tiles(i_m, at, ROWS, BN, MODE)
        i_step, i_turn = skip(i_step, i_turn, n_end_all - n_end, barriers, c, BLOCKS)

        # The last tile that these queries see, which the diagonal or the end of the sequence cuts.
        i_n = (n_end - 1) * BN
        mbarrier.wait(barriers.q_full.index(i_q), phase)
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)
        s_flight = start_scores(buffers.k.index(i_step % STAGES), queries, buffers, S_LAYOUT, MODE, BN)
        b_s = warpgroup_mma_wait(0, deps=(s_flight,))
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        b_s = finish_scores(b_s, i_n, True, queries, MODE, BN)
        shift = alibi_shift(i_n, queries, MODE)
        m = gl.convert_layout(row_max(b_s, BN, BLOCKS), S_ROWS) * factor + shift
        if MODE.fixed_max:  # this tile's serves for all: rows with few keys keep the largest weight, 1, unrounded
            m = gl.maximum(m, LEAST_MAXIMUM)
        o_m = i_m + gl.arange(0, ROWS, S_ROWS)
        b_row_bias = alibi_row_bias(queries.slope2, o_m, i_m + at.offset, at, MODE) if MODE.alibi else 0.0
        if MODE.sinks:  # as if a key without a value had been seen before all others
            m_sink = gl.load(extras.sinks + i_h) * LOG2_E + b_row_bias
            m = gl.maximum(m, m_sink)
        m_safe = gl.where(m == -float("inf"), 0.0, m)
        b_p32 = gl.exp2(b_s * factor - (m_safe - shift)[:, None])
        l = row_sum(b_p32, BN)
        if MODE.sinks:  # a quarter for each of a row's four threads
            l += gl.convert_layout(0.25 * gl.exp2(m_sink - m_safe), gl.SliceLayout(1, l.type.layout))[:, None]
        b_p = round_weights(b_p32, P_LAYOUT, dtype, MODE, BN)
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
                o, b_p, m, l, i_step, i_turn, i_tile_n * BN, is_cut, queries, buffers, barriers, c, BLOCKS, MODE
            )
            i_step += 1
            i_turn += 1

        b_p = as_operand(b_p, n_start * BN, queries, P_LAYOUT, dtype, MODE, BN)
        o_flight = warpgroup_mma(b_p, buffers.v.index(i_step % STAGES), o, is_async=True)
        if not BLOCKS.out_in_q:
            mbarrier.arrive(barriers.q_empty.index(i_q))
        l_row = gl.convert_layout(gl.sum(l, 1), S_ROWS)
        lse2 = m + gl.log2(l_row) - b_row_bias
        o, b_p = warpgroup_mma_wait(0, deps=(o_flight, b_p))
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        i_step, i_turn = skip(i_step + 1, i_turn, n_start - n_start_all, barriers, c, BLOCKS)
        i_round += 1

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
        if BLOCKS.out_in_q:
            tma.store_wait(0)
            mbarrier.arrive(barriers.q_empty.index(i_q))
        # As the plain forward: lse2 for the backward, +inf for a row that saw nothing.
        gl.store(p_lse + i_bh.to(gl.int64) * T + o_m, lse2 / LOG2_E, mask=o_m < T)
        lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)
        T_padded = gl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
        gl.store(p_lse2 + i_bh.to(gl.int64) * T_padded + o_m, lse2, mask=o_m < T_padded)
        i_q, phase = q_stage(i_round, c, BLOCKS)
        i_m_all, i_b, i_h = next_queries(i_q, phase, buffers, barriers)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q, k, v, out, p_lse, p_lse2, extras, p_work, numbers, BLOCKS: gl.constexpr, MODE: gl.constexpr
):  # fmt: skip
    """out and lse of all tiles of queries. Grid: at most a program for each multiprocessor."""
    REGISTERS: gl.constexpr = BLOCKS.registers
    buffers, barriers = allocate(q, v, out, BLOCKS, MODE)
    H, T = q.shape[1], q.shape[2]
    n_tiles = gl.cdiv(T, BLOCKS.consumers * ROWS)
    sizes = Sizes(H, H // k.shape[1], T, k.shape[2], n_tiles, q.shape[0] * H, numbers.n_together >> 2)
    # Gluon takes the roles as a literal; the first has the warps of the launch and the registers that are left.
    if BLOCKS.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (out, p_lse, p_lse2, extras, numbers, buffers, barriers, sizes, 0, BLOCKS, MODE)),
                (consumer, (out, p_lse, p_lse2, extras, numbers, buffers, barriers, sizes, 1, BLOCKS, MODE)),
                (producer, (q, k, v, p_work, extras, numbers, buffers, barriers, sizes, BLOCKS, MODE)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (out, p_lse, p_lse2, extras, numbers, buffers, barriers, sizes, 0, BLOCKS, MODE)),
                (consumer, (out, p_lse, p_lse2, extras, numbers, buffers, barriers, sizes, 1, BLOCKS, MODE)),
                (consumer, (out, p_lse, p_lse2, extras, numbers, buffers, barriers, sizes, 2, BLOCKS, MODE)),
                (producer, (q, k, v, p_work, extras, numbers, buffers, barriers, sizes, BLOCKS, MODE)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, extras: Extras, options: Options, blocks: ForwardBlocks
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D) -> lse (B, H, T) and lse2; fills out, like q. As the plain forward."""
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    lse, lse2 = q.new_empty(B, H, T, dtype=torch.float32), rows_like(q)
    if out.numel() == 0 or S == 0:
        return without_keys(out, lse, lse2, extras)
    n_m = triton.cdiv(T, blocks.consumers * ROWS.value)
    n_programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    forward_kernel[(min(n_programs, n_m * B * H),)](
        tiles(q, ROWS.value, blocks.columns),
        tiles(k, blocks.k, blocks.columns),
        tiles(v, blocks.k, blocks.columns),
        tiles(out, ROWS.value, blocks.columns),
        lse,
        lse2,
        extras,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        launch_numbers(options, extras, head_group_size(B * H, k[0, 0], H // H_kv)),
        BLOCKS=blocks,
        MODE=kernel_mode(q, options, extras),
        num_warps=4,
    )
    return lse, lse2
