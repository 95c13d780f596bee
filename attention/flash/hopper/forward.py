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

from typing import Any, NamedTuple

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
from ..score import (
    LOG2_E,
    alibi_bias,
    alibi_frame,
    base_2,
    change_scores,
    key_interval,
    locate,
    soft_cap_tanh,
)
from ..tiles import ROW_ALIGNMENT, head_group_size, kernel_mode, rows_like
from .configs import ForwardBlocks
from .dropout import drop, load_key
from .schedule import Sizes, key_tiles, sees_key, swizzle
from .softmax import ROWS, rescale, row_max, row_sum
from .tiles import tiles

# While a row's maximum grows by less, in powers of two, the old one serves: it only guards against overflow.
GROWTH = gl.constexpr(8)


class Buffers(NamedTuple):
    """Shared memory: a tile of q and of out for each consumer, stages of k and v, the number of the tile of queries."""

    q: Any
    k: Any
    v: Any
    out: Any
    work: Any


class Barriers(NamedTuple):
    """work, q: for each consumer; kv: for each stage. turn: whose products are next, where consumers take turns."""

    work_full: Any
    q_full: Any
    q_empty: Any
    kv_full: Any
    kv_empty: Any
    turn: Any


class Queries(NamedTuple):
    """A consumer's 64 queries from i_m, and what makes weights of their scores; zeros for what MODE has not.

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
def producer(q, k, v, p_work, extras, buffers, barriers, sizes, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """One warp: hands out tiles of queries, and brings them and the keys and values that they see."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    dtype: gl.constexpr = q.dtype

    i_step = 0
    i_round = 0
    i_work = gl.program_id(0)
    n_work = sizes.n_tiles * sizes.n_heads
    while i_work < n_work:
        i_tile, i_bh = swizzle(i_work, sizes)
        i_m = (sizes.n_tiles - 1 - i_tile) * CONSUMERS * ROWS
        i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
        i_kv = i_h // sizes.G
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(barriers.q_empty.index(c), (i_round & 1) ^ 1)
            buffers.work.index(c).store(gl.full([1], i_work, gl.int32, SCALAR))
            mbarrier.arrive(barriers.work_full.index(c))
            q_full = barriers.q_full.index(c)
            mbarrier.expect(q_full, q.block_type.nbytes)
            b_q = buffers.q.index(c)._reinterpret(dtype, [1, 1, ROWS, BD], q.layout)
            tma.async_copy_global_to_shared(q, [i_b, i_h, i_m + c * ROWS, 0], q_full, b_q)
        at = locate(sizes.T, sizes.S, sizes.q_start, sizes.k_start, sizes.length, extras, i_b)
        n_start, _, _, n_end = key_tiles(i_m, at, CONSUMERS * ROWS, BN, MODE)
        for j in range(n_end - n_start + 1):
            i_n = (n_end - 1 - j) * BN
            has_k, has_v = j < n_end - n_start, j > 0
            i_s = i_step % STAGES
            kv_full = barriers.kv_full.index(i_s)
            mbarrier.wait(barriers.kv_empty.index(i_s), ((i_step // STAGES) & 1) ^ 1)
            mbarrier.expect(kv_full, 2 * k.block_type.nbytes, pred=has_k & has_v)
            mbarrier.expect(kv_full, k.block_type.nbytes, pred=has_k != has_v)
            b_k = buffers.k.index(i_s)._reinterpret(dtype, [1, 1, BN, BD], k.layout)
            b_v = buffers.v.index(i_s)._reinterpret(dtype, [1, 1, BN, BD], v.layout)
            tma.async_copy_global_to_shared(k, [i_b, i_kv, i_n, 0], kv_full, b_k, pred=has_k)
            tma.async_copy_global_to_shared(v, [i_b, i_kv, i_n + BN, 0], kv_full, b_v, pred=has_v)
            i_step += 1
        i_round += 1
        i_work = gl.num_programs(0) + gl.atomic_add(p_work, 1)
    for c in gl.static_range(CONSUMERS):  # work that does not exist ends the consumers
        mbarrier.wait(barriers.q_empty.index(c), (i_round & 1) ^ 1)
        buffers.work.index(c).store(gl.full([1], i_work, gl.int32, SCALAR))
        mbarrier.arrive(barriers.work_full.index(c))


@gluon.jit
def next_work(work_s, work_full, i_round):
    """The number of the tile of queries that the producer hands out."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(work_full, i_round & 1)
    return gl.max(work_s.load(SCALAR), 0)


@gluon.jit
def skip(i_step, i_turn, n, barriers, c: gl.constexpr, BLOCKS: gl.constexpr):
    """(i_step, i_turn) after n key tiles that only other consumers see."""
    for _ in range(n):
        i_s = i_step % BLOCKS.stages
        mbarrier.wait(barriers.kv_full.index(i_s), (i_step // BLOCKS.stages) & 1)
        mbarrier.arrive(barriers.kv_empty.index(i_s))
        i_step += 1
        if BLOCKS.in_turn:
            mbarrier.wait(barriers.turn.index(c), i_turn & 1)
            mbarrier.arrive(barriers.turn.index((c + 1) % BLOCKS.consumers))
            i_turn += 1
    return i_step, i_turn


@gluon.jit
def load_queries(scale_log2, extras, i_m, i_b, i_h, sizes, LAYOUT: gl.constexpr, MODE: gl.constexpr):
    """What belongs to the queries from i_m of query head i_h of row i_b."""
    at = locate(sizes.T, sizes.S, sizes.q_start, sizes.k_start, sizes.length, extras, i_b)
    interval = (0, 0)
    if MODE.bounded or MODE.offsets:
        interval = key_interval(i_m + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), at, MODE)
    slope2 = gl.load(extras.slopes + i_h) * LOG2_E if MODE.alibi else 0.0
    key = load_key(extras.key, i_b, i_h) if MODE.threshold else 0
    return Queries(i_m, at, interval, scale_log2, slope2, key)


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
    THRESHOLD: gl.constexpr = MODE.threshold
    unit = base_2(queries.scale_log2, MODE)
    i_s = i_step % STAGES

    if BLOCKS.in_turn:
        mbarrier.wait(barriers.turn.index(c), i_turn & 1)
    zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    b_k = buffers.k.index(i_s).permute((1, 0))
    s_flight = warpgroup_mma(buffers.q.index(c), b_k, zeros, use_acc=False, is_async=True)
    o_flight = warpgroup_mma(b_p, buffers.v.index(i_s), o, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(s_flight,))
    if BLOCKS.in_turn:
        mbarrier.arrive(barriers.turn.index((c + 1) % BLOCKS.consumers))
    b_s = finish_scores(b_s, i_n, is_cut, queries, MODE, BN)
    shift = alibi_shift(i_n, queries, MODE)

    # (ROWS,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    m_new = gl.convert_layout(row_max(b_s, BN, BLOCKS), m.type.layout) * unit + shift
    m_new = gl.where(m_new - m > GROWTH, m_new, m)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.where(m_new == m, 1.0, gl.exp2(m - m_safe))

    # (ROWS, BN) l is summed before anything is dropped.
    b_p32 = gl.exp2(b_s * unit - (m_safe - shift)[:, None])
    l = l * gl.convert_layout(alpha, L_ROWS)[:, None] + row_sum(b_p32, BN)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    mbarrier.wait(barriers.kv_full.index((i_step + 1) % STAGES), ((i_step + 1) // STAGES) & 1)
    o, b_p = warpgroup_mma_wait(0, deps=(o_flight, b_p))
    mbarrier.arrive(barriers.kv_empty.index(i_s))
    o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    b_p = gl.convert_layout(b_p32.to(buffers.q.dtype), b_p.type.layout)
    if THRESHOLD:
        b_p = drop(b_p, queries.key, queries.i_m, i_n, THRESHOLD, ROWS, BN)
    return o, b_p, m_new, l


@gluon.jit
def consumer(
    out, p_lse, p_lse2, extras, scale_log2, buffers, barriers, sizes,
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
    unit = base_2(scale_log2, MODE)

    i_step = 0
    i_turn = 0
    i_round = 0
    i_work = next_work(buffers.work.index(c), barriers.work_full.index(c), i_round)
    while i_work < sizes.n_tiles * sizes.n_heads:
        i_tile, i_bh = swizzle(i_work, sizes)
        i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
        i_m_all = (sizes.n_tiles - 1 - i_tile) * CONSUMERS * ROWS
        i_m = i_m_all + c * ROWS
        queries = load_queries(scale_log2, extras, i_m, i_b, i_h, sizes, S_LAYOUT, MODE)
        at = queries.at
        n_start_all, _, _, n_end_all = key_tiles(i_m_all, at, CONSUMERS * ROWS, BN, MODE)
        n_start, n_whole, n_full, n_end = key_tiles(i_m, at, ROWS, BN, MODE)
        i_step, i_turn = skip(i_step, i_turn, n_end_all - n_end, barriers, c, BLOCKS)

        # The last tile that these queries see, which the diagonal or the end of the sequence cuts.
        i_n = (n_end - 1) * BN
        mbarrier.wait(barriers.q_full.index(c), i_round & 1)
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)
        zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
        b_k = buffers.k.index(i_step % STAGES).permute((1, 0))
        s_flight = warpgroup_mma(buffers.q.index(c), b_k, zeros, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(s_flight,))
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        b_s = finish_scores(b_s, i_n, True, queries, MODE, BN)
        shift = alibi_shift(i_n, queries, MODE)
        m = gl.convert_layout(row_max(b_s, BN, BLOCKS), S_ROWS) * unit + shift
        o_m = i_m + gl.arange(0, ROWS, S_ROWS)
        b_frame = alibi_frame(queries.slope2, o_m, i_m + at.offset, at, MODE) if MODE.alibi else 0.0
        if MODE.sinks:  # as if a key without a value had been seen before all others
            m_sink = gl.load(extras.sinks + i_h) * LOG2_E + b_frame
            m = gl.maximum(m, m_sink)
        m_safe = gl.where(m == -float("inf"), 0.0, m)
        b_p32 = gl.exp2(b_s * unit - (m_safe - shift)[:, None])
        l = row_sum(b_p32, BN)
        if MODE.sinks:  # a quarter for each of a row's four threads
            l += gl.convert_layout(0.25 * gl.exp2(m_sink - m_safe), gl.SliceLayout(1, l.type.layout))[:, None]
        b_p = gl.convert_layout(b_p32.to(dtype), P_LAYOUT)
        if THRESHOLD:
            b_p = drop(b_p, queries.key, i_m, i_n, THRESHOLD, ROWS, BN)
        o = gl.zeros([ROWS, BD], gl.float32, O_LAYOUT)
        i_step += 1
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)

        for j in range(n_start + 1, n_end):
            i_tile_n = n_end - 1 + n_start - j
            is_cut = (i_tile_n >= n_full) | (i_tile_n < n_whole) if MODE.bounded else i_tile_n >= n_full
            o, b_p, m, l = step(
                o, b_p, m, l, i_step, i_turn, i_tile_n * BN, is_cut, queries, buffers, barriers, c, BLOCKS, MODE
            )
            i_step += 1
            i_turn += 1

        o_flight = warpgroup_mma(b_p, buffers.v.index(i_step % STAGES), o, is_async=True)
        mbarrier.arrive(barriers.q_empty.index(c))
        l_row = gl.convert_layout(gl.sum(l, 1), S_ROWS)
        lse2 = m + gl.log2(l_row) - b_frame
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
        # As the plain forward: lse2 for the backward, +inf for a row that saw nothing.
        gl.store(p_lse + i_bh.to(gl.int64) * T + o_m, lse2 / LOG2_E, mask=o_m < T)
        lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)
        T_padded = gl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
        gl.store(p_lse2 + i_bh.to(gl.int64) * T_padded + o_m, lse2, mask=o_m < T_padded)
        i_work = next_work(buffers.work.index(c), barriers.work_full.index(c), i_round)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "G", "T", "S", "q_start", "k_start", "length", "n_m", "n_heads", "n_together"])
def forward_kernel(
    q, k, v, out, p_lse, p_lse2, extras, p_work, scale_log2, H, G, T, S, q_start, k_start, length,
    n_m, n_heads, n_together, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """out and lse of n_m tiles of queries x n_heads. Grid: at most a program for each multiprocessor."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    REGISTERS: gl.constexpr = BLOCKS.registers
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], BARRIER),
    )
    barriers = Barriers(
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
    )
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(barriers.work_full.index(i), count=1)
        mbarrier.init(barriers.q_full.index(i), count=1)
        mbarrier.init(barriers.q_empty.index(i), count=1)
        mbarrier.init(barriers.turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.kv_full.index(i), count=1)
        mbarrier.init(barriers.kv_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if BLOCKS.in_turn:
        mbarrier.arrive(barriers.turn.index(0))

    sizes = Sizes(H, G, T, S, q_start, k_start, length, n_m, n_heads, n_together)
    # Gluon takes the roles as a literal; the first has the warps of the launch and the registers that are left.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (out, p_lse, p_lse2, extras, scale_log2, buffers, barriers, sizes, 0, BLOCKS, MODE)),
                (consumer, (out, p_lse, p_lse2, extras, scale_log2, buffers, barriers, sizes, 1, BLOCKS, MODE)),
                (producer, (q, k, v, p_work, extras, buffers, barriers, sizes, BLOCKS, MODE)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (out, p_lse, p_lse2, extras, scale_log2, buffers, barriers, sizes, 0, BLOCKS, MODE)),
                (consumer, (out, p_lse, p_lse2, extras, scale_log2, buffers, barriers, sizes, 1, BLOCKS, MODE)),
                (consumer, (out, p_lse, p_lse2, extras, scale_log2, buffers, barriers, sizes, 2, BLOCKS, MODE)),
                (producer, (q, k, v, p_work, extras, buffers, barriers, sizes, BLOCKS, MODE)),
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
        options.scale * LOG2_E.value,
        H,
        H // H_kv,
        T,
        S,
        S - T if options.q_start is None else options.q_start,
        options.k_start or 0,
        0 if extras.starts is None else extras.starts.shape[1],
        n_m,
        B * H,
        head_group_size(B * H, k[0, 0], H // H_kv),
        BLOCKS=blocks,
        MODE=kernel_mode(q, options, extras),
        num_warps=4,
    )
    return lse, lse2
