"""Shared memory of the forward kernel: tiles that its roles exchange, and barriers that signal when they are filled.

The producer fills stages and the consumers empty them; without a producer, the consumer fills the stages that it has
emptied. The phase of a barrier is the parity of the number of waits for it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..formula import LARGEST_TILE
from ..score import locate
from ..tiles import swizzle
from .added import prefetch_pairs
from .program import Stage, barrier, fetch_tile, key_tiles, stage_of, tma_load, wait_empty, wait_full
from .softmax import PARTS, ROWS, bias_in_product, column_numbers


class ForwardBuffers(NamedTuple):
    """Shared memory: stages of q and a tile of out for each consumer, stages of k and v.

    work     for each stage of q: the queries in it, where a producer assigns them
    parts    stages of the values that a formula adds for keys, see added.py
    columns  of a key tile, numbered, where ALiBi's biases come with the product; ones, where a formula's values do
    votes    a number for each thread of a consumer whose steps are optimistic, see `are_small`
    """

    q: Any
    k: Any
    v: Any
    out: Any
    work: Any
    parts: Any
    columns: Any
    votes: Any


class ForwardBarriers(NamedTuple):
    """work, q, kv: one for each stage; work, q_empty and kv_empty only where there is a producer.

    order: one for each consumer, where they start their products one after the other
    """

    work_full: Any
    q_full: Any
    q_empty: Any
    kv_full: Any
    kv_empty: Any
    order: Any


class Work(NamedTuple):
    """A tile of queries that a consumer works on: those from i_m of all consumers, of head i_h of sequence i_b.

    stage  of q in shared memory
    """

    i_m: Any
    i_b: Any
    i_h: Any
    stage: Any


class Keys(NamedTuple):
    """The key tiles from n_start up to n_end of key/value head i_kv of sequence i_b, and their tensors.

    next_start, next_end  of a consumer's second tile of queries, where it has one

    parts  of the values that a formula adds for keys, or None; those of the query head begin at row i_row
    """

    k: Any
    v: Any
    parts: Any
    i_b: Any
    i_kv: Any
    i_row: Any
    n_start: Any
    n_end: Any
    next_start: Any
    next_end: Any


@gluon.jit
def allocate(dtype: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(buffers, barriers), the barriers ready, for tensors of a dtype."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    Q_TILES: gl.constexpr = CONSUMERS * BLOCKS.q_stages
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    q_s = gl.allocate_shared_memory(dtype, [Q_TILES, ROWS, BD], q_layout)
    out_s = q_s
    if not BLOCKS.out_in_q:
        out_s = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout)
    work = 0
    if CONSUMERS > 1:
        work = gl.allocate_shared_memory(gl.int32, [Q_TILES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    columns = 0
    if bias_in_product(MODE.alibi, MODE.soft_cap):
        COLUMNS: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [4, 1], [1, 0])
        columns_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, PARTS], gl.bfloat16)
        b_numbers = column_numbers(BN, COLUMNS)
        columns = gl.allocate_shared_memory(gl.bfloat16, [BN, PARTS], columns_layout, b_numbers)
    parts = 0
    if MODE.biased:
        ONES: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [4, 1], [1, 0])
        ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PARTS], gl.bfloat16)
        parts_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, PARTS], gl.bfloat16)
        b_ones = gl.full([ROWS, PARTS], 1.0, gl.bfloat16, ONES)
        columns = gl.allocate_shared_memory(gl.bfloat16, [ROWS, PARTS], ones_layout, b_ones)
        parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, PARTS], parts_layout)
    votes = 0
    if BLOCKS.optimistic:
        votes = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 4, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    buffers = ForwardBuffers(
        q_s,
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        out_s,
        work,
        parts,
        columns,
        votes,
    )
    # The memory of a barrier that nobody uses would be taken for other data, which PTX leaves undefined.
    work_full, q_empty, kv_empty, order = 0, 0, 0, 0
    if CONSUMERS > 1:
        work_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER)
        q_empty = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER)
        kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for i in gl.static_range(Q_TILES):
            mbarrier.init(work_full.index(i), count=1)
            mbarrier.init(q_empty.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(kv_empty.index(i), count=CONSUMERS)
    if BLOCKS.ping_pong:
        order = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(order.index(i), count=1)
    barriers = ForwardBarriers(
        work_full,
        gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER),
        q_empty,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        kv_empty,
        order,
    )
    for i in gl.static_range(Q_TILES):
        mbarrier.init(barriers.q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.kv_full.index(i), count=1)
    fence_async_shared()
    if BLOCKS.ping_pong:
        mbarrier.arrive(barriers.order.index(0))
    return buffers, barriers


@gluon.jit
def producer(q, k, v, parts, p_work, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """One warp: hands out tiles of queries, and brings them and the keys and values that they see."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    STAGES: gl.constexpr = BLOCKS.stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    i_work = gl.program_id(0)
    n_work = sizes.n_tiles * sizes.n_heads
    while i_work < n_work:
        i_tile, i_bh = swizzle(i_work, sizes.n_tiles, sizes.n_heads, sizes.n_together)
        i_m = (sizes.n_tiles - 1 - i_tile) * CONSUMERS * ROWS
        i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
        for c in gl.static_range(CONSUMERS):
            stage = q_stage(i_round, c, BLOCKS)
            hand_out(Work(i_m, i_b, i_h, stage), buffers, barriers)
            fetch_queries(q, i_b, i_h, i_m + c * ROWS, stage.index, buffers, barriers)
        pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, i_b, i_bh, 1)
        n_start, _, _, n_end = key_tiles(i_m, pos, CONSUMERS * ROWS, BN, MODE)
        keys = Keys(k, v, parts, i_b, i_h // sizes.G, first_part(i_bh, sizes, MODE), n_start, n_end, 0, 0)
        for j in range(n_end - n_start + 1):
            stage = stage_of(i_step, STAGES)
            if MODE.added == "pair":
                i_n = gl.maximum(n_end - 1 - j, n_start) * BN
                prefetch_pairs(program.inputs.formula[0], i_b, i_h, i_m, i_n, CONSUMERS * ROWS, BN)
            wait_empty(barriers.kv_empty, stage)
            fetch(j, stage.index, keys, buffers, barriers, BLOCKS, MODE)
            i_step += 1
        i_round += 1
        i_work = gl.num_programs(0) + gl.atomic_add(p_work, 1, sem="relaxed")
    for c in gl.static_range(CONSUMERS):  # a head that does not exist ends the consumers
        hand_out(Work(0, 0, -1, q_stage(i_round, c, BLOCKS)), buffers, barriers)


@gluon.jit
def fetch_queries(q, i_b, i_h, i_m, i_q, buffers, barriers):
    """Have the queries from i_m brought to stage i_q."""
    q_full = barriers.q_full.index(i_q)
    mbarrier.expect(q_full, q.block_type.nbytes)
    b_q = buffers.q.index(i_q)
    fetch_tile(q, [i_b, i_h, i_m, 0], q_full, b_q)


@gluon.jit
def first_part(i_bh, sizes, MODE: gl.constexpr):
    """The row at which the values of a query head's keys begin, in whole tiles; 0 where there are none."""
    return i_bh * (gl.cdiv(sizes.S, LARGEST_TILE) * LARGEST_TILE) if MODE.biased else 0


@gluon.jit
def fetch(j, i_s, keys, buffers, barriers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Have stage i_s filled for step j of the walk over `keys`: k of a tile and v of the tile before it."""
    BN: gl.constexpr = BLOCKS.k
    k, v = keys.k, keys.v
    i_n = (keys.n_end - 1 - j) * BN
    has_k, has_v = j < keys.n_end - keys.n_start, (j > 0) & (j <= keys.n_end - keys.n_start)
    kv_full = barriers.kv_full.index(i_s)
    if MODE.biased:
        parts = keys.parts
        mbarrier.expect(kv_full, 2 * k.block_type.nbytes + parts.block_type.nbytes, pred=has_k & has_v)
        mbarrier.expect(kv_full, k.block_type.nbytes + parts.block_type.nbytes, pred=has_k & (not has_v))
        mbarrier.expect(kv_full, k.block_type.nbytes, pred=has_v & (not has_k))
        tma_load(parts, [keys.i_row + i_n, 0], kv_full, buffers.parts.index(i_s), pred=has_k)
    else:
        mbarrier.expect(kv_full, 2 * k.block_type.nbytes, pred=has_k & has_v)
        mbarrier.expect(kv_full, k.block_type.nbytes, pred=has_k != has_v)
    b_k, b_v = buffers.k.index(i_s), buffers.v.index(i_s)
    v_position = [keys.i_b, keys.i_kv, i_n + BN, 0]
    fetch_tile(k, [keys.i_b, keys.i_kv, i_n, 0], kv_full, b_k, has_k)
    fetch_tile(v, v_position, kv_full, b_v, has_v)


@gluon.jit
def fetch_alone(j, i_s, keys, buffers, barriers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """`fetch` for step j of a consumer alone, whose walk for a second tile of queries follows that for the first."""
    if BLOCKS.q_stages > 1:
        k, v, parts, i_b, i_kv, i_row, n_start, n_end, next_start, next_end = keys
        n_steps = n_end - n_start + 1
        is_first = j < n_steps
        n_start, n_end = gl.where(is_first, n_start, next_start), gl.where(is_first, n_end, next_end)
        keys = Keys(k, v, parts, i_b, i_kv, i_row, n_start, n_end, 0, 0)
        j = gl.where(is_first, j, j - n_steps)
    fetch(j, i_s, keys, buffers, barriers, BLOCKS, MODE)


@gluon.jit
def release_stage(i_step, keys, buffers, barriers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Have the stage of step i_step filled again, by the producer or, where there is none, by this consumer."""
    if BLOCKS.consumers == 1:
        barrier()  # all four warps have used the tiles
        fetch_alone(i_step + BLOCKS.stages, i_step % BLOCKS.stages, keys, buffers, barriers, BLOCKS, MODE)
    else:
        mbarrier.arrive(barriers.kv_empty.index(i_step % BLOCKS.stages))


@gluon.jit
def q_stage(i_round, c: gl.constexpr, BLOCKS: gl.constexpr):
    """The Stage of consumer c's queries of this round."""
    return Stage(i_round % BLOCKS.q_stages * BLOCKS.consumers + c, i_round // BLOCKS.q_stages & 1)


@gluon.jit
def hand_out(work, buffers, barriers):
    """Tell a consumer which queries are next, as soon as there is a place for them."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    wait_empty(barriers.q_empty, work.stage)
    o = gl.arange(0, 4, WORDS)
    words = gl.where(o == 0, work.i_m, gl.where(o == 1, work.i_b, work.i_h))
    buffers.work.index(work.stage.index).store(words)
    mbarrier.arrive(barriers.work_full.index(work.stage.index))


@gluon.jit
def next_work(i_round, buffers, barriers, c: gl.constexpr, BLOCKS: gl.constexpr):
    """The Work that the producer hands out to consumer c in this round; its head is negative after the last."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    stage = q_stage(i_round, c, BLOCKS)
    wait_full(barriers.work_full, stage)
    o = gl.arange(0, 4, WORDS)
    words = buffers.work.index(stage.index).load(WORDS)
    return Work(
        gl.sum(gl.where(o == 0, words, 0), 0),
        gl.sum(gl.where(o == 1, words, 0), 0),
        gl.sum(gl.where(o == 2, words, 0), 0),
        stage,
    )


@gluon.jit
def skip(i_step, i_order, n, barriers, c: gl.constexpr, BLOCKS: gl.constexpr):
    """(i_step, i_order) after n key tiles that only other consumers see."""
    for _ in range(n):
        stage = stage_of(i_step, BLOCKS.stages)
        wait_full(barriers.kv_full, stage)
        mbarrier.arrive(barriers.kv_empty.index(stage.index))
        i_step += 1
        if BLOCKS.ping_pong:
            mbarrier.wait(barriers.order.index(c), i_order & 1)
            mbarrier.arrive(barriers.order.index((c + 1) % BLOCKS.consumers))
            i_order += 1
    return i_step, i_order
