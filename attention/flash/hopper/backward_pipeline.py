"""Shared memory of the backward kernel, the roles that feed its consumer, and the kernel that runs before it.

The producer hands out key tiles and fills stages, and the consumer empties them. The consumer fills slots of dq, and
the adders of backward.py empty them. The writer takes dk and dv away, and mask drawers draw dropout's words. The phase
of a barrier is the parity of the number of waits for it.

`delta_kernel` writes delta of each row of queries, and prepares lse2 as the next kernel reads it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .. import tiles as plain
from ..call import KernelCall
from ..launch import launch
from ..score import LOG2_E, locate
from ..tiles import swizzle
from .added import PARTS, bf16_parts, prefetch_pairs
from .configs import BackwardBlocks
from .masks import WORDS_IN_SHARED_MEMORY, draw_transposed, load_key
from .program import fetch_tile, query_tiles, stage_of, take_tile, tma_load, wait_empty, wait_full

SLOTS = gl.constexpr(2)  # of dq in shared memory
WIDTH = gl.constexpr(256)  # of a row of the workspace: a value for each of the consumer's threads


class BackwardBuffers(NamedTuple):
    """Shared memory: stages of k and v; stages of q, do, lse2 and delta; ds; slots of dq; the key tile handed out.

    parts  for each stage: lse2 and delta as operands, where they come with the products s and dp
    ones   the other operand: for lse2, and for delta
    words  for each stage: dropout's words, where the dropout warps draw them
    """

    k: Any
    v: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    parts: Any
    ones: Any
    sum_ones: Any
    ds: Any
    dq: Any
    words: Any
    tile: Any


class BackwardBarriers(NamedTuple):
    """One barrier for the key tile handed out (tile), one for each stage of keys (kv, dkdv), for each stage of queries
    (full, empty, words) and for each slot of dq.

    The producer and the dropout warps both wait for `empty`, and fill a stage together.
    """

    tile_full: Any
    tile_empty: Any
    kv_full: Any
    kv_empty: Any
    dkdv_full: Any
    full: Any
    empty: Any
    dq_ready: Any
    dq_full: Any
    words_full: Any


class KeyTile(NamedTuple):
    """A tile of keys: number i_tile of a key/value head, whose first query head is i_h of sequence i_b.

    i_tile is negative where no tile is left. The other fields are those of QueryTiles, for the query tiles that see it.
    """

    i_tile: Any
    i_b: Any
    i_h: Any
    start: Any
    last: Any
    first: Any
    full_start: Any
    full_end: Any
    end: Any


FIELDS = gl.constexpr(len(KeyTile._fields))


class Part(NamedTuple):
    """The queries of a query tile or of half of it, or a piece of them, in shared memory, and the place of their ds.

    i_m     the first of them
    i_part  the first of the tile or the half
    words   dropout's, where they are drawn in advance: such a tile is one part in one piece
    """

    i_m: Any
    i_part: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    parts: Any
    ds: Any
    words: Any


@gluon.jit
def every_second_column(i: gl.constexpr, BN: gl.constexpr):
    """(BN, PARTS): ones in the columns i, i + 2, ..., which `delta_kernel` gives to lse2 (0) and delta (1)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [8, 1], [1, 0])
    o_c = gl.zeros([BN, 1], gl.int32, LAYOUT) + gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.where(o_c % 2 == i, 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def bias_columns(b_x, LAYOUT: gl.constexpr):
    """(BN, PARTS): ones in the columns 0, 2, 4 and 6, for lse2; b_x (BN,) as three bf16 values in 8, 10 and 12."""
    high, middle, low = bf16_parts(b_x)
    o_c = gl.zeros([b_x.shape[0], 1], gl.int32, LAYOUT) + gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))[None, :]
    b_low = gl.where(o_c == 12, low[:, None], 0.0)
    b_parts = gl.where(o_c == 8, high[:, None], gl.where(o_c == 10, middle[:, None], b_low))
    return gl.where((o_c < 8) & (o_c % 2 == 0), 1.0, b_parts).to(gl.bfloat16)


@gluon.jit
def allocate(dtype: gl.constexpr, dq_sum, BLOCKS: gl.constexpr):
    """(buffers, barriers), the barriers ready."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BD], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    lse2, delta, parts, ones, sum_ones, words, words_full = 0, 0, 0, 0, 0, 0, 0
    if BLOCKS.rows_in_products:
        parts_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, PARTS], gl.bfloat16)
        ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, PARTS], gl.bfloat16)
        parts = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, PARTS], parts_layout)
        ones = gl.allocate_shared_memory(gl.bfloat16, [2, BN, PARTS], ones_layout)
        for i in gl.static_range(2):
            ones.index(i).store(every_second_column(i, BN))
    else:
        lse2 = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], dq_sum.layout)
        delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], dq_sum.layout)
    if BLOCKS.sums == "ds":
        M: gl.constexpr = BLOCKS.part // BLOCKS.pieces
        ONES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0])
        sum_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, M], dtype)
        sum_ones = gl.allocate_shared_memory(dtype, [8, M], sum_layout, gl.full([8, M], 1.0, dtype, ONES))
    if BLOCKS.mask_drawer:
        words = gl.allocate_shared_memory(gl.uint32, [STAGES, BN // 2, BM // 2], WORDS_IN_SHARED_MEMORY)
        # The memory of a barrier that nobody uses would be taken for other data, which PTX leaves undefined.
        words_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for i in gl.static_range(STAGES):
            mbarrier.init(words_full.index(i), count=1)
    buffers = BackwardBuffers(
        gl.allocate_shared_memory(dtype, [KEY_STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [KEY_STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        lse2,
        delta,
        parts,
        ones,
        sum_ones,
        gl.allocate_shared_memory(dtype, [1, BN, BM], ds_layout),  # `step` indexes it with `unknown_zero`
        gl.allocate_shared_memory(gl.float32, [SLOTS, BM * BD // WIDTH, WIDTH], dq_sum.layout),
        words,
        gl.allocate_shared_memory(gl.int32, [FIELDS, 1], BARRIER),
    )
    barriers = BackwardBarriers(
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        words_full,
    )
    mbarrier.init(barriers.tile_full, count=1)
    mbarrier.init(barriers.tile_empty, count=2 + SLOTS + (1 if BLOCKS.mask_drawer else 0))
    for i in gl.static_range(KEY_STAGES):
        mbarrier.init(barriers.kv_full.index(i), count=1)
        mbarrier.init(barriers.kv_empty.index(i), count=1)
        mbarrier.init(barriers.dkdv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.full.index(i), count=1)
        mbarrier.init(barriers.empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.dq_ready.index(i), count=1)
        mbarrier.init(barriers.dq_full.index(i), count=1)
    fence_async_shared()
    return buffers, barriers


@gluon.jit
def part_of(i_m, i_s, i: gl.constexpr, buffers, BLOCKS: gl.constexpr):
    """Part i of the query tile from i_m, which is in stage i_s."""
    M: gl.constexpr = BLOCKS.part
    o: gl.constexpr = i * M
    return Part(
        i_m + o,
        i_m + o,
        buffers.q.index(i_s).slice(o, M),
        buffers.do.index(i_s).slice(o, M),
        0 if BLOCKS.rows_in_products else buffers.lse2.index(i_s).slice(o, M, 1),
        0 if BLOCKS.rows_in_products else buffers.delta.index(i_s).slice(o, M, 1),
        buffers.parts.index(i_s).slice(o, M) if BLOCKS.rows_in_products else 0,
        buffers.ds.index(0).slice(o, M, 1),
        buffers.words.index(i_s) if BLOCKS.mask_drawer else 0,
    )


@gluon.jit
def piece_of(part, i: gl.constexpr, BLOCKS: gl.constexpr):
    """Piece i of a part, without lse2 and delta as operands and ds, which are those of products of the whole."""
    n: gl.constexpr = BLOCKS.part // BLOCKS.pieces
    o: gl.constexpr = i * n
    return Part(
        part.i_m + o,
        part.i_m,
        part.q.slice(o, n),
        part.do.slice(o, n),
        0 if BLOCKS.rows_in_products else part.lse2.slice(o, n, 1),
        0 if BLOCKS.rows_in_products else part.delta.slice(o, n, 1),
        0,
        0,
        part.words,
    )


@gluon.jit
def place(i, tile):
    """(query head, query tile) of step i of a key tile: head after head, and the last query tile first."""
    n = tile.end - tile.start
    return tile.i_h + i // n, tile.end - 1 - i % n


@gluon.jit
def row_stride(S, BLOCKS: gl.constexpr):
    """The stride of rows of ds, (B, H, T, S); the compiler learns that they are aligned, where they are."""
    return (S >> 2) * 4 if BLOCKS.ds_aligned else S


@gluon.jit
def hand_out(p_work, i_round, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The next key tile by the counter, for all roles."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes
    i_work = gl.atomic_add(p_work, 1)
    n_work = sizes.n_tiles * sizes.n_heads
    i_tile, i_bkv = swizzle(gl.minimum(i_work, n_work - 1), sizes.n_tiles, sizes.n_heads, sizes.n_together)
    H_kv = sizes.H // sizes.G
    i_b, i_kv = i_bkv // H_kv, i_bkv % H_kv
    pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, i_b, i_bkv * sizes.G, sizes.G)
    seen = query_tiles(i_tile, pos, sizes, BLOCKS.q, BLOCKS.k, MODE)
    i_tile = gl.where(i_work < n_work, i_tile, -1)
    end = gl.maximum(seen.end, seen.start)
    tile = KeyTile(i_tile, i_b, i_kv * sizes.G, seen.start, seen.last, seen.first, seen.full_start, seen.full_end, end)
    mbarrier.wait(barriers.tile_empty, (i_round & 1) ^ 1)
    for i in gl.static_range(FIELDS):
        buffers.tile.index(i).store(gl.full([1], tile[i], gl.int32, SCALAR))
    mbarrier.arrive(barriers.tile_full)
    return tile


@gluon.jit
def load_field(buffers, i: gl.constexpr, WARPS: gl.constexpr):
    """A number of the key tile handed out."""
    return gl.max(buffers.tile.index(i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def next_tile(i_round, buffers, barriers, WARPS: gl.constexpr):
    """The key tile handed out, for a role of so many warps."""
    mbarrier.wait(barriers.tile_full, i_round & 1)
    tile = KeyTile(
        load_field(buffers, 0, WARPS),
        load_field(buffers, 1, WARPS),
        load_field(buffers, 2, WARPS),
        load_field(buffers, 3, WARPS),
        load_field(buffers, 4, WARPS),
        load_field(buffers, 5, WARPS),
        load_field(buffers, 6, WARPS),
        load_field(buffers, 7, WARPS),
        load_field(buffers, 8, WARPS),
    )
    mbarrier.arrive(barriers.tile_empty)
    return tile


class Unseen(NamedTuple):
    """The query tiles that see none of the keys from i_n: `each` of every query head, `count` in all.

    They are those before `start`, and those from `start` + `seen` on.
    """

    i_n: Any
    start: Any
    seen: Any
    each: Any
    count: Any


@gluon.jit
def unseen_tiles(tile, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The Unseen of key tile n - 1 - t, whose zeros are written during the steps of `tile`, number t of n.

    With a causal mask, one has as many steps as the other has query tiles of zeros.
    """
    sizes = program.sizes
    i_tile = sizes.n_tiles - 1 - tile.i_tile
    i_bh = tile.i_b * sizes.H + tile.i_h
    pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, tile.i_b, i_bh, sizes.G)
    tiles = query_tiles(i_tile, pos, sizes, BLOCKS.q, BLOCKS.k, MODE)
    seen = gl.maximum(tiles.end - tiles.start, 0)
    each = gl.cdiv(sizes.T, BLOCKS.q) - seen
    return Unseen(i_tile * BLOCKS.k, tiles.start, seen, each, each * sizes.G)


@gluon.jit
def write_zeros(ds, unseen, i_first, n, tile, program, BLOCKS: gl.constexpr):
    """One warp: zeros in ds (B, H, T, S) for n of the unseen query tiles, from number i_first on."""
    sizes = program.sizes
    stride = row_stride(sizes.S, BLOCKS)
    o_n = unseen.i_n + gl.arange(0, BLOCKS.k, gl.BlockedLayout([4], [32], [1], [0]))
    for i in range(i_first, gl.minimum(i_first + n, unseen.count)):
        i_tile_m = i % unseen.each
        i_m = (i_tile_m + gl.where(i_tile_m < unseen.start, 0, unseen.seen)) * BLOCKS.q
        i_bh = tile.i_b * sizes.H + tile.i_h + i // unseen.each
        p_row = ds + (gl.cast(i_bh, gl.int64) * sizes.T + i_m) * stride + o_n
        for _ in range(i_m, gl.minimum(i_m + BLOCKS.q, sizes.T)):
            gl.store(p_row, 0.0, mask=o_n < stride, eviction_policy="evict_first")
            p_row += stride


@gluon.jit
def producer(q, k, v, do, rows, delta, ds, p_work, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """One warp: hands out key tiles, and brings k and v and, for every step, q, do, lse2 and delta.

    Where ds is needed it also writes the zeros of ds, in each step those of a few unseen tiles.

    rows: the parts of lse2 and delta, where these come with the products; else lse2.
    """
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    STAGES: gl.constexpr = BLOCKS.stages
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    tile = hand_out(p_work, i_round, program, BLOCKS, MODE)
    while tile.i_tile >= 0:
        stage = stage_of(i_round, KEY_STAGES)
        full = barriers.kv_full.index(stage.index)
        position = [tile.i_b, tile.i_h // sizes.G, tile.i_tile * BN, 0]
        b_k, b_v = buffers.k.index(stage.index), buffers.v.index(stage.index)
        wait_empty(barriers.kv_empty, stage)
        mbarrier.expect(full, 2 * k.block_type.nbytes)
        fetch_tile(k, position, full, b_k)
        fetch_tile(v, position, full, b_v)
        n_steps = (tile.end - tile.start) * sizes.G
        if BLOCKS.writes_ds:
            unseen = unseen_tiles(tile, program, BLOCKS, MODE)
            n_unseen = gl.cdiv(unseen.count, gl.maximum(n_steps, 1))  # for each step
            if n_steps == 0:
                write_zeros(ds, unseen, 0, n_unseen, tile, program, BLOCKS)
        for i in range(n_steps):
            i_h, i_tile_m = place(i, tile)
            i_bh, i_m = tile.i_b * sizes.H + i_h, i_tile_m * BM
            stage = stage_of(i_step, STAGES)
            full = barriers.full.index(stage.index)
            b_q, b_do = buffers.q.index(stage.index), buffers.do.index(stage.index)
            if MODE.added == "pair":
                prefetch_pairs(program.inputs.formula[0], tile.i_b, i_h, i_m, tile.i_tile * BN, BM, BN)
            wait_empty(barriers.empty, stage)
            if BLOCKS.rows_in_products:
                mbarrier.expect(full, 2 * q.block_type.nbytes + rows.block_type.nbytes)
                i_row = (i_bh * gl.cdiv(sizes.T, BM) + i_tile_m) * BM
                tma_load(rows, [i_row, 0], full, buffers.parts.index(stage.index))
            else:
                mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * rows.block_type.nbytes)
                tma_load(rows, [i_bh, i_m], full, buffers.lse2.index(stage.index))
                tma_load(delta, [i_bh, i_m], full, buffers.delta.index(stage.index))
            fetch_tile(q, [tile.i_b, i_h, i_m, 0], full, b_q)
            fetch_tile(do, [tile.i_b, i_h, i_m, 0], full, b_do)
            if BLOCKS.writes_ds:
                write_zeros(ds, unseen, i * n_unseen, n_unseen, tile, program, BLOCKS)
            i_step += 1
        i_round += 1
        tile = hand_out(p_work, i_round, program, BLOCKS, MODE)


@gluon.jit
def writer(dk, dv, program, BLOCKS: gl.constexpr):
    """One warp: takes dk and dv away, which the consumer puts where k and v were."""
    BN: gl.constexpr = BLOCKS.k
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 1)
    while tile.i_tile >= 0:
        stage = stage_of(i_round, KEY_STAGES)
        position = [tile.i_b, tile.i_h // sizes.G, tile.i_tile * BN, 0]
        b_dk, b_dv = buffers.k.index(stage.index), buffers.v.index(stage.index)
        wait_full(barriers.dkdv_full, stage)
        take_tile(dk, position, b_dk)
        take_tile(dv, position, b_dv)
        tma.store_wait(0)
        mbarrier.arrive(barriers.kv_empty.index(stage.index))
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 1)


@gluon.jit
def mask_drawer(program, BLOCKS: gl.constexpr):
    """Four warps: draw dropout's words for every step, while the consumer is at work on the steps before."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    STAGES: gl.constexpr = BLOCKS.stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 4)
    while tile.i_tile >= 0:
        for i in range((tile.end - tile.start) * sizes.G):
            i_h, i_tile_m = place(i, tile)
            key = load_key(program.inputs.key, tile.i_b, i_h)
            stage = stage_of(i_step, STAGES)
            b_w = draw_transposed(key, i_tile_m * BM, tile.i_tile * BN, BM, BN, 4)
            wait_empty(barriers.empty, stage)
            buffers.words.index(stage.index).store(b_w)
            mbarrier.arrive(barriers.words_full.index(stage.index))
            i_step += 1
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 4)


class Counters(NamedTuple):
    """In device memory, set to zero before the kernels that count; None for those that a head size does not need.

    next_tile  for each query tile the next key tile that may add to its dq
    work       the next key tile to take
    dq_work    the next query tile to take, where dq has a kernel of its own
    """

    next_tile: Any
    work: Any
    dq_work: Any


class DeltaRows(NamedTuple):
    """Values of each row of queries that `delta_kernel` stores; None for those that the next kernel does not read.

    parts  (rows of whole tiles, 8) bf16: lse2 and delta as operands of a product, in alternate columns; or 16 columns,
           with ones in every second of the last 8
    """

    lse2: Any
    delta: Any
    parts: Any


@triton.jit
def negative_parts(x):
    """x (M,) as (M, 4): three values, exact in bf16, whose sum is -x, and a zero."""
    high = -x.to(tl.bfloat16).to(tl.float32)
    middle = -(x + high).to(tl.bfloat16).to(tl.float32)
    low = -x - high - middle
    return tl.join(tl.join(high, low), tl.join(middle, tl.zeros_like(x))).reshape([x.shape[0], 4])


class DeltaConstants(NamedTuple):
    """`delta_kernel`'s constants besides its tiles."""

    keep: float  # probability that dropout keeps a weight
    biased: bool  # whether `DeltaRows.parts` has ones, for the parts of a bias of the keys


@triton.jit(do_not_specialize=["scale_log2", "H", "T", "n_m"])
def delta_kernel(
    out, do, lse2, rows, counters, slopes, scale_log2, H, T, n_m, BLOCKS: tl.constexpr, CONSTANTS: tl.constexpr
):  # fmt: skip
    """delta of one tile of queries without dropout's rescaling, and lse2, which with ALiBi includes the query biases.

    Also sets the counters of the kernels that follow to zero. Grid: n_m tiles x batch x heads.
    """
    BM: tl.constexpr = BLOCKS.q
    BD: tl.constexpr = BLOCKS.columns
    i_bh, i_m = tl.program_id(0) // n_m, tl.program_id(0) % n_m * BM
    b_do = plain.load_tile(do, i_bh // H, i_bh % H, i_m, BM, BD).to(tl.float32)
    b_out = plain.load_tile(out, i_bh // H, i_bh % H, i_m, BM, BD).to(tl.float32)
    b_delta = tl.sum(b_out * b_do, 1) * CONSTANTS.keep
    o_m = i_m + tl.arange(0, BM)
    o_row = i_bh.to(tl.int64) * tl.cdiv(T, plain.ROW_ALIGNMENT) * plain.ROW_ALIGNMENT + o_m
    o_tile = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    # DeltaRows beyond the end have an infinite lse2 and so no weight: ALiBi gives all queries of a part the bias of its
    # first one, which can be large.
    b_lse2 = tl.load(lse2 + o_row, mask=o_m < T, other=float("inf"))
    if slopes is not None:
        b_lse2 += tl.load(slopes + i_bh % H) * LOG2_E * (o_m % BLOCKS.part).to(tl.float32)
    if rows.lse2 is not None:
        tl.store(rows.lse2 + o_tile, b_lse2)
    if rows.delta is not None:
        tl.store(rows.delta + o_row, b_delta, mask=o_m < T)
    if rows.parts is not None:
        # 1e30 for infinity, which has no second and third part.
        b_lse = tl.where(b_lse2 == float("inf"), 1e30, b_lse2 / scale_log2)
        b_parts = tl.join(negative_parts(b_lse), negative_parts(b_delta)).reshape([BM, 8])
        if CONSTANTS.biased:  # ones, for the parts of the bias
            p_parts = rows.parts + o_tile[:, None] * 16 + tl.arange(0, 8)[None, :]
            tl.store(p_parts, b_parts.to(tl.bfloat16))
            ones = tl.zeros([BM, 8], tl.float32) + (1 - tl.arange(0, 8) % 2)[None, :]
            tl.store(p_parts + 8, ones.to(tl.bfloat16))
        else:
            tl.store(rows.parts + o_tile[:, None] * 8 + tl.arange(0, 8)[None, :], b_parts.to(tl.bfloat16))
    if counters.next_tile is not None:
        tl.store(counters.next_tile + tl.program_id(0), 0)
    tl.store(counters.work, 0, mask=tl.program_id(0) == 0)
    if counters.dq_work is not None:
        tl.store(counters.dq_work, 0, mask=tl.program_id(0) == 0)


def launch_delta(
    out: Tensor,
    do: Tensor,
    lse2: Tensor,
    rows: DeltaRows,
    counters: Counters,
    call: KernelCall,
    blocks: BackwardBlocks,
    biased: bool,
) -> None:
    """Run `delta_kernel` for out and its gradient do (B, H, T, D), and the forward's lse2 (B, H, T)."""
    B, H, T, _ = out.shape
    n_m = (T + blocks.q - 1) // blocks.q
    launch(
        delta_kernel,
        (B * H * n_m, 1, 1),
        plain.tiles(out, blocks.q, blocks.columns),
        plain.tiles(do, blocks.q, blocks.columns),
        lse2,
        rows,
        counters,
        call.inputs.slopes,
        call.spec.scale * LOG2_E.value,
        H,
        T,
        n_m,
        BLOCKS=blocks,
        CONSTANTS=DeltaConstants((256 - call.spec.threshold) / 256, biased),
        enable_fp_fusion=True,
    )
