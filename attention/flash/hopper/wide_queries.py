"""dq of wide heads, 129 to 256 columns, on Hopper: two consumers of 64 queries each walk over the key tiles they see.

    producer   one warp: hands out tiles of 128 queries, brings their q, do, lse2 and delta, and tiles of 64 keys
    consumer   four warps: s, p, dp, ds; dq += ds k

A consumer starts the scores of the next keys before it waits for the product with the current ones, and its
exponentials run during dp and the products of the other consumer. Nothing is added in device memory.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...scores.alibi import alibi_bias
from ...scores.soft_cap import soft_cap_tanh, times_derivative
from ..score import LOG2_E, change_scores, key_interval, locate, log2_factor, sees_key
from ..tiles import swizzle
from .backward_step import done, unknown_zero
from .compat import reinterpret, tma_load, tma_store
from .dropout import drop, load_key
from .forward_pipeline import Work, hand_out, next_work, q_stage
from .schedule import Program, Sizes, key_tiles
from .softmax import ROWS
from .stages import stage_of, wait_empty, wait_full

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of s and dp: (queries, keys)
V_STAGES = gl.constexpr(1)  # v has done its part when dp is there


class Buffers(NamedTuple):
    """Shared memory: q, do, lse2 and delta of each consumer, and which queries they are (work); stages of k and v."""

    q: Any
    do: Any
    lse2: Any
    delta: Any
    work: Any
    k: Any
    v: Any


class Barriers(NamedTuple):
    """One for each consumer's queries (work, q), and for each stage of k and v."""

    work_full: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class Queries(NamedTuple):
    """The 64 queries from i_m of consumer c, and the values that turn their scores into weights.

    slope2  of ALiBi, times log2(e)
    key     dropout's counters
    """

    c: Any
    i_m: Any
    lse2: Any
    delta: Any
    interval: Any
    slope2: Any
    key: Any
    pos: Any


@gluon.jit
def ready(n: gl.constexpr, COUNT: gl.constexpr):
    """n barriers, for so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def allocate(q, rows, BLOCKS: gl.constexpr):
    """(buffers, barriers), the barriers ready."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, ROWS], rows.layout),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, ROWS], rows.layout),
        gl.allocate_shared_memory(gl.int32, [CONSUMERS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [V_STAGES, BN, BD], k_layout),
    )
    barriers = Barriers(
        ready(CONSUMERS, 1),
        ready(CONSUMERS, 1),
        ready(CONSUMERS, 1),
        ready(STAGES, 1),
        ready(STAGES, CONSUMERS),
        ready(V_STAGES, 1),
        ready(V_STAGES, CONSUMERS),
    )
    fence_async_shared()
    return buffers, barriers


@gluon.jit
def producer(q, k, v, do, lse2, delta, p_work, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """One warp: hands out tiles of queries, and brings them and the keys and values that they see."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    i_work = gl.program_id(0)
    n_work = sizes.n_tiles * sizes.n_heads
    while i_work < n_work:
        i_tile, i_bh = swizzle(i_work, sizes.n_tiles, sizes.n_heads, sizes.n_together)
        i_m = (sizes.n_tiles - 1 - i_tile) * CONSUMERS * ROWS
        i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
        i_kv = i_h // sizes.G
        for c in gl.static_range(CONSUMERS):
            hand_out(Work(i_m, i_b, i_h, q_stage(i_round, c, BLOCKS)), buffers, barriers)
            full = barriers.q_full.index(c)
            mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
            tma_load(lse2, [i_bh, i_m + c * ROWS], full, buffers.lse2.index(c))
            tma_load(delta, [i_bh, i_m + c * ROWS], full, buffers.delta.index(c))
            b_q = reinterpret(buffers.q.index(c), q.dtype, [1, 1, ROWS, BD], q.layout)
            b_do = reinterpret(buffers.do.index(c), q.dtype, [1, 1, ROWS, BD], q.layout)
            tma_load(q, [i_b, i_h, i_m + c * ROWS, 0], full, b_q)
            tma_load(do, [i_b, i_h, i_m + c * ROWS, 0], full, b_do)
        pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, i_b, i_bh, 1)
        n_start, _, _, n_end = key_tiles(i_m, pos, CONSUMERS * ROWS, BN, MODE)
        for j in range(n_start, n_end):
            position = [i_b, i_kv, (n_end - 1 + n_start - j) * BN, 0]
            fetch(k, position, stage_of(i_step, BLOCKS.stages), buffers.k, barriers.k_full, barriers.k_empty)
            fetch(v, position, stage_of(i_step, V_STAGES), buffers.v, barriers.v_full, barriers.v_empty)
            i_step += 1
        i_round += 1
        i_work = gl.num_programs(0) + gl.atomic_add(p_work, 1, sem="relaxed")
    for c in gl.static_range(CONSUMERS):  # a head that does not exist ends the consumers
        hand_out(Work(0, 0, -1, q_stage(i_round, c, BLOCKS)), buffers, barriers)


@gluon.jit
def fetch(x, position, stage, tiles, full, empty):
    """Have a stage of k or v filled."""
    b_x = reinterpret(tiles.index(stage.index), x.dtype, x.block_shape, x.layout)
    wait_empty(empty, stage)
    mbarrier.expect(full.index(stage.index), x.block_type.nbytes)
    tma_load(x, position, full.index(stage.index), b_x)


@gluon.jit
def start_scores(i_step, queries, program, BLOCKS: gl.constexpr):
    """In flight: q k^T (ROWS, BN) of a step whose keys have arrived."""
    BN: gl.constexpr = BLOCKS.k
    stage = stage_of(i_step, BLOCKS.stages)
    b_q = program.buffers.q.index(queries.c + unknown_zero(i_step))
    b_k = program.buffers.k.index(stage.index)
    b_s = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    return warpgroup_mma(b_q, b_k.permute((1, 0)), b_s, use_acc=False, is_async=True)


@gluon.jit
def weights(b_s, i_n, is_cut, queries, scale_log2, BN: gl.constexpr, MODE: gl.constexpr):
    """p times the derivative of the scores, (ROWS, BN)."""
    o_m = queries.i_m + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))[:, None]
    o_columns = gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))[None, :]
    pos = queries.pos
    b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
    # For the first query: `delta_kernel` adds the difference of the others' bias to lse2.
    own = queries.i_m + pos.offset
    b_bias = alibi_bias(queries.slope2, o_m, o_columns, i_n, own, pos, MODE) if MODE.alibi else None
    b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
    if is_cut:
        b_s = gl.where(sees_key(o_m, i_n + o_columns, queries.interval, pos, MODE), b_s, -float("inf"))
    b_p = gl.exp2(b_s * log2_factor(scale_log2, MODE) - queries.lse2)
    return times_derivative(b_p, b_tanh, MODE)


@gluon.jit
def step(b_s, b_dq, i_step, i_n, is_cut, has_next, queries, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(the scores of the next keys, dq): dq += ds k, of the keys from i_n."""
    BN: gl.constexpr = BLOCKS.k
    THRESHOLD: gl.constexpr = MODE.threshold
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_dq.type.layout, 2)
    buffers, barriers = program.buffers, program.barriers
    dtype: gl.constexpr = buffers.q.dtype
    k_stage, v_stage = stage_of(i_step, BLOCKS.stages), stage_of(i_step, V_STAGES)
    wait_full(barriers.v_full, v_stage)
    b_dp = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    zero = unknown_zero(i_step)
    b_do, b_v = buffers.do.index(queries.c + zero), buffers.v.index(zero)
    dp_flight = warpgroup_mma(b_do, b_v.permute((1, 0)), b_dp, use_acc=False, is_async=True)
    b_p = weights(b_s, i_n, is_cut, queries, program.scalars.scale_log2, BN, MODE)
    if THRESHOLD:
        b_kept = drop(b_p.to(dtype), queries.key, queries.i_m, i_n, THRESHOLD, ROWS, BN)
    # Before dp, because ptxas moves exponentials across the wait for a product, but not across this one.
    wait_full(barriers.k_full, stage_of(i_step + 1, BLOCKS.stages), has_next)
    b_dp = warpgroup_mma_wait(0, deps=(dp_flight,))
    mbarrier.arrive(barriers.v_empty.index(v_stage.index))
    if THRESHOLD:
        b_dp = gl.where(b_kept != 0.0, b_dp, 0.0)
    b_ds = gl.convert_layout((b_p * (b_dp - queries.delta)).to(dtype), P_LAYOUT)
    dq_flight = warpgroup_mma(b_ds, buffers.k.index(k_stage.index), b_dq, is_async=True)
    s_flight = start_scores(i_step + 1, queries, program, BLOCKS)
    b_dq = done((dq_flight,), (b_ds,), 1)[0]
    mbarrier.arrive(barriers.k_empty.index(k_stage.index))
    b_s = warpgroup_mma_wait(0, deps=(s_flight,))
    return b_s, b_dq


@gluon.jit
def skip(i_step, n, barriers, BLOCKS: gl.constexpr):
    """The next step after n key tiles that only the other consumer sees."""
    for _ in range(n):
        k_stage, v_stage = stage_of(i_step, BLOCKS.stages), stage_of(i_step, V_STAGES)
        wait_full(barriers.k_full, k_stage)
        mbarrier.arrive(barriers.k_empty.index(k_stage.index))
        wait_full(barriers.v_full, v_stage)
        mbarrier.arrive(barriers.v_empty.index(v_stage.index))
        i_step += 1
    return i_step


@gluon.jit
def consumer(dq, program, c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Four warps: dq of 64 queries of each tile that the producer hands out."""
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes
    i_step = 0
    i_round = 0
    work = next_work(i_round, buffers, barriers, c, BLOCKS)
    while work.i_h >= 0:
        i_m = work.i_m + c * ROWS
        pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, work.i_b, work.i_b * sizes.H + work.i_h, 1)
        n_start_all, _, _, n_end_all = key_tiles(work.i_m, pos, BLOCKS.consumers * ROWS, BN, MODE)
        n_start, n_full_start, n_full_end, n_end = key_tiles(i_m, pos, ROWS, BN, MODE)
        interval = (0, 0)
        if MODE.bounded or MODE.offsets:
            interval = key_interval(i_m + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT)), pos, MODE)
        slope2 = gl.load(program.inputs.slopes + work.i_h) * LOG2_E if MODE.alibi else 0.0
        key = load_key(program.inputs.key, work.i_b, work.i_h) if MODE.threshold else 0
        wait_full(barriers.q_full, work.stage)
        b_lse2 = buffers.lse2.index(c).permute((1, 0)).load(S_LAYOUT)
        b_delta = buffers.delta.index(c).permute((1, 0)).load(S_LAYOUT)
        queries = Queries(c, i_m, b_lse2, b_delta, interval, slope2, key, pos)
        i_step = skip(i_step, n_end_all - n_end, barriers, BLOCKS)
        b_dq = gl.zeros([ROWS, BD], gl.float32, LAYOUT)
        wait_full(barriers.k_full, stage_of(i_step, BLOCKS.stages))
        s_flight = start_scores(i_step, queries, program, BLOCKS)
        b_s = warpgroup_mma_wait(0, deps=(s_flight,))
        for j in range(n_start, n_end):
            i_tile = n_end - 1 + n_start - j
            is_cut = i_tile >= n_full_end
            if MODE.bounded:
                is_cut |= i_tile < n_full_start
            b_s, b_dq = step(b_s, b_dq, i_step, i_tile * BN, is_cut, j + 1 < n_end, queries, program, BLOCKS, MODE)
            i_step += 1
        i_step = skip(i_step, n_start - n_start_all, barriers, BLOCKS)
        buffers.q.index(c).store((b_dq * (program.scalars.scale * KEEP_SCALE)).to(dq.dtype))
        fence_async_shared()
        b_out = reinterpret(buffers.q.index(c), dq.dtype, [1, 1, ROWS, BD], dq.layout)
        tma_store(dq, [work.i_b, work.i_h, i_m, 0], b_out)
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(c))
        i_round += 1
        work = next_work(i_round, buffers, barriers, c, BLOCKS)


@gluon.jit
def dq_kernel(q, k, v, do, dq, lse2, delta, p_work, inputs, scalars, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """dq of all tiles of queries. Grid: at most a program for each multiprocessor."""
    buffers, barriers = allocate(q, lse2, BLOCKS)
    H, T = q.shape[1], q.shape[2]
    n_tiles = gl.cdiv(T, BLOCKS.consumers * ROWS)
    sizes = Sizes(H, H // k.shape[1], T, k.shape[2], n_tiles, q.shape[0] * H, scalars.n_together >> 2)
    # Gluon takes the roles as a literal; the first has the warps of the launch and the registers that are left.
    gl.warp_specialize(
        [
            (consumer, (dq, Program(inputs, scalars, buffers, barriers, sizes), 0, BLOCKS, MODE)),
            (consumer, (dq, Program(inputs, scalars, buffers, barriers, sizes), 1, BLOCKS, MODE)),
            (
                producer,
                (q, k, v, do, lse2, delta, p_work, Program(inputs, scalars, buffers, barriers, sizes), BLOCKS, MODE),
            ),
        ],
        [4, 1],
        [240, 24],
    )
