"""What the roles of the backward kernel share: tiles in shared memory, and barriers that say when they are there.

The producer fills stages and the consumer empties them; the consumer fills slots of dq and the adders empty them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

SLOTS = gl.constexpr(2)  # of dq in shared memory
WIDTH = gl.constexpr(256)  # of a row of the workspace: a number for each of the consumer's threads


class Buffers(NamedTuple):
    """Shared memory: k and v; stages of q, do, lse2 and delta; ds; slots of dq."""

    k: Any
    v: Any
    q: Any
    do: Any
    lse2: Any
    delta: Any
    ds: Any
    dq: Any


class Barriers(NamedTuple):
    """kv: k and v have arrived. full, empty: for each stage. dq_ready, dq_full: for each slot."""

    kv: Any
    full: Any
    empty: Any
    dq_ready: Any
    dq_full: Any


class KeyTile(NamedTuple):
    """A program's work: key tile i_tile of a key/value head, whose first query head is i_h of row i_b.

    at       where the row's queries and keys stand
    queries  the query tiles that see it
    """

    i_tile: Any
    i_b: Any
    i_kv: Any
    i_h: Any
    at: Any
    queries: Any


@gluon.jit
def allocate(dtype: gl.constexpr, lse2, BLOCKS: gl.constexpr):
    """(buffers, barriers), the barriers ready."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BD], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse2.layout),
        gl.allocate_shared_memory(dtype, [BN, BM], ds_layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BM * BD // WIDTH, WIDTH], lse2.layout),
    )
    barriers = Barriers(
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER),
    )
    mbarrier.init(barriers.kv, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.full.index(i), count=1)
        mbarrier.init(barriers.empty.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.dq_ready.index(i), count=1)
        mbarrier.init(barriers.dq_full.index(i), count=1)
    fence_async_shared()
    return buffers, barriers


@gluon.jit
def producer(q, k, v, do, lse2, delta, tile, buffers, barriers, sizes, BLOCKS: gl.constexpr):
    """One warp: brings k and v once, and q, do, lse2 and delta of every query tile."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    dtype: gl.constexpr = q.dtype
    seen = tile.queries

    mbarrier.expect(barriers.kv, 2 * k.block_type.nbytes)
    position = [tile.i_b, tile.i_kv, tile.i_tile * BN, 0]
    tma.async_copy_global_to_shared(k, position, barriers.kv, buffers.k._reinterpret(dtype, [1, 1, BN, BD], k.layout))
    tma.async_copy_global_to_shared(v, position, barriers.kv, buffers.v._reinterpret(dtype, [1, 1, BN, BD], v.layout))
    i_step = 0
    for i_h in range(tile.i_h, tile.i_h + sizes.G):
        i_bh = tile.i_b * sizes.H + i_h
        for j in range(seen.end - seen.start):
            i_m = (seen.end - 1 - j) * BM
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
