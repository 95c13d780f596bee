"""The backward of wide heads, 129 to 256 columns, on Hopper: dq's kernel, and the launches; wide_keys.py has dk and dv.

s and dp are computed twice, as in the plain backward. One kernel for all would have dk and dv of 64 keys in its
registers, and add dq of each query tile in device memory twice as often as at head size 128.

In dq's kernel two consumers of 64 queries each walk over the key tiles that they see:

    producer   one warp: hands out tiles of 128 queries, brings their q, do, lse2 and delta, and tiles of 64 keys
    consumer   four warps: s, p, dp, ds; dq += ds k

A consumer starts the scores of the next keys before it waits for the product with the current ones, and its
exponentials run during dp and the products of the other consumer. Nothing is added in device memory.
"""

from typing import Any, NamedTuple

import torch
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

from ...gpu import multiprocessors
from ...scores.alibi import alibi_bias
from ...scores.sinks import sinks_gradient_of_kernels
from ...scores.soft_cap import soft_cap_tanh, times_derivative
from .. import tiles as plain
from ..backward import Gradients
from ..call import KernelCall
from ..launch import launch
from ..score import LOG2_E, change_scores, key_interval, locate, log2_factor, sees_key
from ..tiles import swizzle
from .added import hopper_inputs, hopper_mode
from .backward_pipeline import Counters, DeltaRows, launch_delta
from .backward_step import done, unknown_zero
from .configs import DQ_BLOCKS, backward_blocks
from .forward_pipeline import Work, hand_out, next_work, q_stage
from .masks import drop, load_key
from .program import (
    Program,
    Sizes,
    fetch_tile,
    key_tiles,
    row_tiles,
    run_roles,
    stage_of,
    take_tile,
    tiles,
    tma_load,
    wait_empty,
    wait_full,
)
from .softmax import ROWS
from .wide_keys import dkdv_kernel

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of s and dp: (queries, keys)
V_STAGES = gl.constexpr(1)  # v has done its part when dp is there


class DqBuffers(NamedTuple):
    """Shared memory: q, do, lse2 and delta of each consumer, and which queries they are (work); stages of k and v."""

    q: Any
    do: Any
    lse2: Any
    delta: Any
    work: Any
    k: Any
    v: Any


class DqBarriers(NamedTuple):
    """One for each consumer's queries (work, q), and for each stage of k and v."""

    work_full: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class DqQueries(NamedTuple):
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
    buffers = DqBuffers(
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, ROWS], rows.layout),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, 1, ROWS], rows.layout),
        gl.allocate_shared_memory(gl.int32, [CONSUMERS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [V_STAGES, BN, BD], k_layout),
    )
    barriers = DqBarriers(
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
            b_q, b_do = buffers.q.index(c), buffers.do.index(c)
            fetch_tile(q, [i_b, i_h, i_m + c * ROWS, 0], full, b_q)
            fetch_tile(do, [i_b, i_h, i_m + c * ROWS, 0], full, b_do)
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
    b_x = tiles.index(stage.index)
    wait_empty(empty, stage)
    mbarrier.expect(full.index(stage.index), x.block_type.nbytes)
    fetch_tile(x, position, full.index(stage.index), b_x)


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
        queries = DqQueries(c, i_m, b_lse2, b_delta, interval, slope2, key, pos)
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
        take_tile(dq, [work.i_b, work.i_h, i_m, 0], buffers.q.index(c))
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
    program = Program(inputs, scalars, buffers, barriers, sizes)
    run_roles(
        (consumer, (dq, program, 0, BLOCKS, MODE)),
        [
            (consumer, (dq, program, 1, BLOCKS, MODE), 4, 240),
            (producer, (q, k, v, do, lse2, delta, p_work, program, BLOCKS, MODE), 1, 24),
        ],
    )


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    gradients: Gradients,
    call: KernelCall,
) -> Tensor | None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills dq, dk and dv, and delta where it is asked for.

    Returns the gradient of the sinks (H,), or None where there are none.
    """
    sinks, slopes = call.inputs.sinks, call.inputs.slopes
    problem = call.problem(q, k)
    blocks = backward_blocks(problem)
    mode = hopper_mode(call.spec, problem.head_dim, problem.dtype, call.inputs.horizons is not None)
    (B, H, T, _), (H_kv, S) = q.shape, k.shape[1:3]
    n_m, n_n = (T + blocks.q - 1) // blocks.q, (S + blocks.k - 1) // blocks.k
    do = plain.addressable(do)
    delta = plain.rows_like(q) if gradients.delta is None else gradients.delta
    counters = Counters(None, q.new_empty(1, dtype=torch.int32), q.new_empty(1, dtype=torch.int32))
    rows = DeltaRows(
        lse2=None if slopes is None else q.new_empty(B, H, n_m * blocks.q, dtype=torch.float32), delta=delta, parts=None
    )
    launch_delta(out, do, lse2, rows, counters, call, blocks, False)
    lse2_rows = row_tiles(lse2, T, blocks.q) if slopes is None else row_tiles(rows.lse2, n_m * blocks.q, blocks.q)
    delta_rows = row_tiles(delta, T, blocks.q)
    inputs, n_programs = hopper_inputs(call, T, S), multiprocessors(q.device)
    queries = [tiles(x, blocks.q, blocks.columns) for x in (q, do, gradients.dq)]
    keys = [tiles(x, blocks.k, blocks.columns) for x in (k, v, gradients.dk, gradients.dv)]
    n_together = plain.head_group_size(B * H_kv, H // H_kv * plain.head_bytes(q))
    launch(
        dkdv_kernel,
        (min(n_programs, n_n * B * H_kv),),
        queries[0],
        keys[0],
        keys[1],
        queries[1],
        keys[2],
        keys[3],
        lse2_rows,
        delta_rows,
        counters.work,
        inputs,
        plain.launch_scalars(call, n_together),
        BLOCKS=blocks,
        MODE=mode,
        num_warps=4,
        enable_fp_fusion=True,
    )
    rows_of_tile = DQ_BLOCKS.consumers * ROWS.value
    n_tiles = (T + rows_of_tile - 1) // rows_of_tile
    n_together = plain.head_group_size(B * H, plain.head_bytes(k), H // H_kv)
    launch(
        dq_kernel,
        (min(n_programs, n_tiles * B * H),),
        queries[0],
        keys[0],
        keys[1],
        queries[1],
        queries[2],
        lse2_rows,
        delta_rows,
        counters.dq_work,
        inputs,
        plain.launch_scalars(call, n_together),
        BLOCKS=DQ_BLOCKS,
        MODE=mode,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return None if sinks is None else sinks_gradient_of_kernels(sinks, lse2, delta, T, call.spec.threshold)
