"""What the roles of the backward kernel share: tiles in shared memory, and barriers that say when they are there.

The producer hands out key tiles, fills stages, and the consumer empties them; the consumer fills slots of dq and the
adders empty them. A barrier's phase is the parity of how often it was waited for.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..score import locate
from .schedule import query_tiles, swizzle

SLOTS = gl.constexpr(2)  # of dq in shared memory
WIDTH = gl.constexpr(256)  # of a row of the workspace: a number for each of the consumer's threads
HALF = gl.constexpr(64)  # queries that are worked on at a time


class Buffers(NamedTuple):
    """Shared memory: stages of k and v; stages of q, do, lse2 and delta; ds; slots of dq; the key tile handed out."""

    k: Any
    v: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    ds: Any
    dq: Any
    tile: Any


class Barriers(NamedTuple):
    """tile: of keys, handed out. kv, dkdv: for each stage of keys. full, empty: for each stage. dq: for each slot."""

    tile_full: Any
    tile_empty: Any
    kv_full: Any
    kv_empty: Any
    dkdv_full: Any
    full: Any
    empty: Any
    dq_ready: Any
    dq_full: Any


class KeyTile(NamedTuple):
    """A tile of keys: that with number i_tile of a key/value head, whose first query head is i_h of row i_b.

    i_tile is negative where no tile is left. The others are what QueryTiles says of the query tiles that see it.
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


class Half(NamedTuple):
    """HALF queries from i_m of a query tile, in shared memory, and the place of their ds."""

    i_m: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    ds: Any


@gluon.jit
def allocate(dtype: gl.constexpr, lse2, BLOCKS: gl.constexpr):
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
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [KEY_STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [KEY_STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse2.layout),
        gl.allocate_shared_memory(dtype, [BN, BM], ds_layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BM * BD // WIDTH, WIDTH], lse2.layout),
        gl.allocate_shared_memory(gl.int32, [FIELDS, 1], BARRIER),
    )
    barriers = Barriers(
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
    )
    mbarrier.init(barriers.tile_full, count=1)
    mbarrier.init(barriers.tile_empty, count=2 + SLOTS)
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
def half_of(i_m, i_s, i: gl.constexpr, buffers):
    """Half i of the query tile from i_m, which is in stage i_s."""
    o: gl.constexpr = i * HALF
    return Half(
        i_m + o,
        buffers.q.index(i_s).slice(o, HALF),
        buffers.do.index(i_s).slice(o, HALF),
        buffers.lse2.index(i_s).slice(o, HALF, 1),
        buffers.delta.index(i_s).slice(o, HALF, 1),
        buffers.ds.slice(o, HALF, 1),
    )


@gluon.jit
def place(i, tile):
    """(query head, query tile) of step i of a key tile: head after head, and the last query tile first."""
    n = tile.end - tile.start
    return tile.i_h + i // n, tile.end - 1 - i % n


@gluon.jit
def hand_out(p_work, i_round, extras, numbers, buffers, barriers, sizes, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The next key tile by the counter, for all roles."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i_work = gl.atomic_add(p_work, 1)
    n_work = sizes.n_tiles * sizes.n_heads
    i_tile, i_bkv = swizzle(gl.minimum(i_work, n_work - 1), sizes)
    H_kv = sizes.H // sizes.G
    i_b, i_kv = i_bkv // H_kv, i_bkv % H_kv
    at = locate(sizes.T, sizes.S, extras, numbers, i_b)
    seen = query_tiles(i_tile, at, sizes, BLOCKS.q, BLOCKS.k, MODE)
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


@gluon.jit
def producer(
    q, k, v, do, lse2, delta, p_work, extras, numbers, buffers, barriers, sizes,
    BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """One warp: hands out key tiles, and brings k and v and, for every step, q, do, lse2 and delta."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    dtype: gl.constexpr = q.dtype

    i_step = 0
    i_round = 0
    tile = hand_out(p_work, i_round, extras, numbers, buffers, barriers, sizes, BLOCKS, MODE)
    while tile.i_tile >= 0:
        i_s = i_round % KEY_STAGES
        full = barriers.kv_full.index(i_s)
        position = [tile.i_b, tile.i_h // sizes.G, tile.i_tile * BN, 0]
        b_k = buffers.k.index(i_s)._reinterpret(dtype, [1, 1, BN, BD], k.layout)
        b_v = buffers.v.index(i_s)._reinterpret(dtype, [1, 1, BN, BD], v.layout)
        mbarrier.wait(barriers.kv_empty.index(i_s), ((i_round // KEY_STAGES) & 1) ^ 1)
        mbarrier.expect(full, 2 * k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, position, full, b_k)
        tma.async_copy_global_to_shared(v, position, full, b_v)
        for i in range((tile.end - tile.start) * sizes.G):
            i_h, i_tile_m = place(i, tile)
            i_bh, i_m = tile.i_b * sizes.H + i_h, i_tile_m * BM
            i_s = i_step % STAGES
            full = barriers.full.index(i_s)
            b_q = buffers.q.index(i_s)._reinterpret(dtype, [1, 1, BM, BD], q.layout)
            b_do = buffers.do.index(i_s)._reinterpret(dtype, [1, 1, BM, BD], do.layout)
            mbarrier.wait(barriers.empty.index(i_s), ((i_step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
            tma.async_copy_global_to_shared(q, [tile.i_b, i_h, i_m, 0], full, b_q)
            tma.async_copy_global_to_shared(lse2, [i_bh, i_m], full, buffers.lse2.index(i_s))
            tma.async_copy_global_to_shared(do, [tile.i_b, i_h, i_m, 0], full, b_do)
            tma.async_copy_global_to_shared(delta, [i_bh, i_m], full, buffers.delta.index(i_s))
            i_step += 1
        i_round += 1
        tile = hand_out(p_work, i_round, extras, numbers, buffers, barriers, sizes, BLOCKS, MODE)


@gluon.jit
def carrier(dk, dv, buffers, barriers, sizes, BLOCKS: gl.constexpr):
    """One warp: takes dk and dv away, which the consumer puts where k and v were."""
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages

    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 1)
    while tile.i_tile >= 0:
        i_s = i_round % KEY_STAGES
        position = [tile.i_b, tile.i_h // sizes.G, tile.i_tile * BN, 0]
        b_dk = buffers.k.index(i_s)._reinterpret(dk.dtype, [1, 1, BN, BD], dk.layout)
        b_dv = buffers.v.index(i_s)._reinterpret(dv.dtype, [1, 1, BN, BD], dv.layout)
        mbarrier.wait(barriers.dkdv_full.index(i_s), (i_round // KEY_STAGES) & 1)
        tma.async_copy_shared_to_global(dk, position, b_dk)
        tma.async_copy_shared_to_global(dv, position, b_dv)
        tma.store_wait(0)
        mbarrier.arrive(barriers.kv_empty.index(i_s))
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 1)
