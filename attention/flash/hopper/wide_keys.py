"""dk and dv of wide heads, 129 to 256 columns, on Hopper: two warpgroups, each with one of the gradients in registers.

A program takes tiles of 64 keys, one after the other, and walks over the query tiles that see them, the last first:

    producer  one warp: hands out key tiles, brings k and v, and q, do, lse2 and delta of the next query tiles
    consumer  four warps for the values: s and p, which goes to shared memory too; dv += p^T do
    consumer  four warps for the keys: dp, and ds with that p; dk += ds^T q
    writer    one warp: takes dk and dv away, which the consumers leave in the places of v and k

Each consumer starts its first product of the next query tile before it waits for its last one of this tile, and the
products of one run during the exponentials of the other. dq has a kernel of its own, see wide.py.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..score import LOG2_E, locate
from .backward_pipeline import FIELDS, Part, hand_out, next_tile, place, writer
from .backward_step import QueryTile, done, weights
from .masks import draw_transposed, load_key, word_layout
from .program import Program, Sizes, fetch_tile, run_roles, stage_of, tma_load, wait_empty, wait_full

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # of s^T and dp^T: (keys, queries)


class DkdvBuffers(NamedTuple):
    """Shared memory: k and v; stages of q, do, lse2, delta and p, the weights times the derivative of the scores; the
    key tile handed out."""

    k: Any
    v: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    p: Any
    tile: Any


class DkdvBarriers(NamedTuple):
    """One barrier for the key tile handed out (tile), one for k and v (kv, dkdv), and one for each stage (full, empty;
    p_full)."""

    tile_full: Any
    tile_empty: Any
    kv_full: Any
    kv_empty: Any
    dkdv_full: Any
    full: Any
    empty: Any
    p_full: Any


@gluon.jit
def allocate(q, rows, BLOCKS: gl.constexpr):
    """(buffers, barriers), the barriers ready."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BD], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    buffers = DkdvBuffers(
        gl.allocate_shared_memory(dtype, [1, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [1, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], rows.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], rows.layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BM], p_layout),
        gl.allocate_shared_memory(gl.int32, [FIELDS, 1], BARRIER),
    )
    barriers = DkdvBarriers(
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
    )
    mbarrier.init(barriers.tile_full, count=1)
    mbarrier.init(barriers.tile_empty, count=3)
    mbarrier.init(barriers.kv_full.index(0), count=1)
    mbarrier.init(barriers.kv_empty.index(0), count=1)
    mbarrier.init(barriers.dkdv_full.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.full.index(i), count=1)
        mbarrier.init(barriers.empty.index(i), count=2)
        mbarrier.init(barriers.p_full.index(i), count=1)
    fence_async_shared()
    return buffers, barriers


@gluon.jit
def fetch_keys(k, v, tile, i_round, program):
    """Have k and v of a key tile brought, when those before have made room."""
    buffers, barriers = program.buffers, program.barriers
    position = [tile.i_b, tile.i_h // program.sizes.G, tile.i_tile * k.block_shape[2], 0]
    full = barriers.kv_full.index(0)
    wait_empty(barriers.kv_empty, stage_of(i_round, 1))
    mbarrier.expect(full, 2 * k.block_type.nbytes)
    fetch_tile(k, position, full, buffers.k.index(0))
    fetch_tile(v, position, full, buffers.v.index(0))


@gluon.jit
def producer(q, k, v, do, lse2, delta, p_work, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """One warp: hands out key tiles, and brings k and v and, for every step, q, do, lse2 and delta.

    The queries of the first steps come before k and v, which have to wait until dk and dv have been taken away.
    """
    STAGES: gl.constexpr = BLOCKS.stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    tile = hand_out(p_work, i_round, program, BLOCKS, MODE)
    while tile.i_tile >= 0:
        n_steps = (tile.end - tile.start) * sizes.G
        n_early = gl.minimum(n_steps, STAGES)
        if n_steps == 0:
            fetch_keys(k, v, tile, i_round, program)
        for i in range(n_steps):
            i_h, i_tile_m = place(i, tile)
            i_bh, i_m = tile.i_b * sizes.H + i_h, i_tile_m * BLOCKS.q
            stage = stage_of(i_step, STAGES)
            i_s = stage.index
            full = barriers.full.index(i_s)
            wait_empty(barriers.empty, stage)
            mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
            tma_load(lse2, [i_bh, i_m], full, buffers.lse2.index(i_s))
            tma_load(delta, [i_bh, i_m], full, buffers.delta.index(i_s))
            position = [tile.i_b, i_h, i_m, 0]
            fetch_tile(q, position, full, buffers.q.index(i_s))
            fetch_tile(do, position, full, buffers.do.index(i_s))
            if i + 1 == n_early:
                fetch_keys(k, v, tile, i_round, program)
            i_step += 1
        i_round += 1
        tile = hand_out(p_work, i_round, program, BLOCKS, MODE)


@gluon.jit
def draw(i_h, i_tile_m, tile, inputs, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Dropout's words for a query tile of head i_h; zero without dropout."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    b_w = 0
    if MODE.threshold:
        b_w = draw_transposed(load_key(inputs.key, tile.i_b, i_h), i_tile_m * BM, tile.i_tile * BN, BM, BN, 4)
        b_w = gl.convert_layout(b_w, word_layout(BN // 2, BM // 2, 4))
    return b_w


@gluon.jit
def first_product(b_rows, tiles, i_step, is_there, program, BLOCKS: gl.constexpr):
    """In flight: s or dp, of k and q or of v and do (BN, BM), when the step's query tile has arrived."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    stage = stage_of(i_step, BLOCKS.stages)
    wait_full(program.barriers.full, stage, is_there)
    b_x = gl.zeros([BN, BM], gl.float32, S_LAYOUT)
    return warpgroup_mma(b_rows, tiles.index(stage.index).permute((1, 0)), b_x, use_acc=False, is_async=True)


@gluon.jit
def step(
    b_x, b_w, b_sum, queries, tile, pos, program, OF_VALUES: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr
):
    """(s or dp of the next query tile, dropout's words for it, the gradient), from those of this one."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_sum.type.layout, 2)
    buffers, barriers = program.buffers, program.barriers
    dtype: gl.constexpr = buffers.q.dtype
    stage = stage_of(queries.i_step, BLOCKS.stages)
    i_s, i_m = stage.index, queries.i_tile * BLOCKS.q
    b_q, b_do = buffers.q.index(i_s), buffers.do.index(i_s)
    if OF_VALUES:
        is_cut = queries.i_tile < tile.full_start
        if MODE.bounded:
            is_cut |= queries.i_tile >= tile.full_end
        rows = Part(i_m, i_m, b_q, b_do, buffers.lse2.index(i_s), 0, 0, 0, 0)
        b_p, b_operand = weights(b_x, b_w, rows, is_cut, queries, tile, pos, program, P_LAYOUT, BLOCKS, MODE)
        if MODE.threshold:  # the sign tells the other consumer which of them dropout drops
            b_p = gl.where(gl.convert_layout(b_operand, S_LAYOUT) != 0.0, b_p, -b_p)
        # This stage was filled again after both consumers had left it: nobody reads its p.
        buffers.p.index(i_s).store(b_p.to(dtype))
        mbarrier.arrive(barriers.p_full.index(i_s))
        sum_flight = warpgroup_mma(b_operand, b_do, b_sum, is_async=True)
        x_flight = first_product(buffers.k.index(0), buffers.q, queries.i_step + 1, queries.has_next, program, BLOCKS)
        b_w = draw(queries.next_h, queries.next_tile, tile, program.inputs, BLOCKS, MODE)
    else:
        b_delta = buffers.delta.index(i_s).load(S_LAYOUT)
        wait_full(barriers.p_full, stage)
        b_p = buffers.p.index(i_s).load(S_LAYOUT).to(gl.float32)
        b_ds = b_p * (b_x - b_delta)
        if MODE.threshold:
            b_ds = gl.where(b_p > 0.0, b_ds, b_p * b_delta)
        b_operand = gl.convert_layout(b_ds.to(dtype), P_LAYOUT)
        sum_flight = warpgroup_mma(b_operand, b_q, b_sum, is_async=True)
        x_flight = first_product(buffers.v.index(0), buffers.do, queries.i_step + 1, queries.has_next, program, BLOCKS)
    b_sum = done((sum_flight,), (b_operand,), 1)[0]
    mbarrier.arrive(barriers.empty.index(i_s))
    b_x = warpgroup_mma_wait(0, deps=(x_flight,))
    return b_x, b_w, b_sum


@gluon.jit
def consumer(program, OF_VALUES: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Four warps: dv of tiles of keys, or dk, summed over the G query heads that share them."""
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 4)
    while tile.i_tile >= 0:
        i_bh = tile.i_b * sizes.H + tile.i_h
        pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, tile.i_b, i_bh, sizes.G)
        n_steps = (tile.end - tile.start) * sizes.G
        b_own = buffers.k.index(0) if OF_VALUES else buffers.v.index(0)
        wait_full(barriers.kv_full, stage_of(i_round, 1))
        b_sum = gl.zeros([BN, BD], gl.float32, LAYOUT)
        queries_of = buffers.q if OF_VALUES else buffers.do
        x_flight = first_product(b_own, queries_of, i_step, n_steps > 0, program, BLOCKS)
        b_x = warpgroup_mma_wait(0, deps=(x_flight,))
        i_h, i_tile_m = tile.i_h, tile.end - 1
        b_w = draw(i_h, i_tile_m, tile, program.inputs, BLOCKS, MODE) if OF_VALUES else 0
        for i in range(n_steps):
            ends_head = i_tile_m == tile.start
            next_h = gl.where(ends_head, gl.minimum(i_h + 1, tile.i_h + sizes.G - 1), i_h)
            next_m = gl.where(ends_head, tile.end - 1, i_tile_m - 1)
            slope2 = gl.load(program.inputs.slopes + i_h) * LOG2_E if OF_VALUES and MODE.alibi else 0.0
            queries = QueryTile(i_h, i_tile_m, slope2, 0.0, 0.0, 0, next_h, next_m, i_step + i, i + 1 < n_steps)
            b_x, b_w, b_sum = step(b_x, b_w, b_sum, queries, tile, pos, program, OF_VALUES, BLOCKS, MODE)
            i_h, i_tile_m = next_h, next_m
        i_step += n_steps
        # Only this consumer reads the operand that makes room: s needs no v, and dp no k.
        b_own.store((b_sum * (KEEP_SCALE if OF_VALUES else program.scalars.scale * KEEP_SCALE)).to(buffers.q.dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.dkdv_full.index(0))
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 4)


@gluon.jit
def dkdv_kernel(q, k, v, do, dk, dv, lse2, delta, p_work, inputs, scalars, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """dk and dv of all tiles of keys. Grid: at most a program for each multiprocessor."""
    buffers, barriers = allocate(q, lse2, BLOCKS)
    H, H_kv, T, S = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    sizes = Sizes(H, H // H_kv, T, S, gl.cdiv(S, BLOCKS.k), q.shape[0] * H_kv, scalars.n_together >> 2)
    program = Program(inputs, scalars, buffers, barriers, sizes)
    run_roles(
        (consumer, (program, True, BLOCKS, MODE)),
        [
            (consumer, (program, False, BLOCKS, MODE), 4, 240),
            (producer, (q, k, v, do, lse2, delta, p_work, program, BLOCKS, MODE), 1, 24),
            (writer, (dv, dk, program, BLOCKS), 1, 24),
        ],
    )
