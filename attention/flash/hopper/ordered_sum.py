"""The sum of dq over key tiles, in device memory and in a fixed order.

A counter for each query tile holds the index of the next key tile that may add.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .backward_pipeline import SLOTS, next_tile, place
from .compat import reinterpret, tma_add, tma_load, tma_store


@gluon.jit
def await_order(p_next, i_tile):
    """Spin until the counter is i_tile. Earlier contributions are then visible to the copy engine."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 t;
        WAIT: ld.acquire.gpu.global.b32 t, [$1];
        setp.ne.s32 p, t, $2;
        @p bra WAIT;
        fence.proxy.async.global;
        mov.b32 $0, t;
        }""",
        "=r,l,r,~{memory}",
        [p_next, i_tile],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def allow_next(p_next, i_next):
    """Wait until this warp's contribution is in device memory, not only read from shared memory; then increment."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync -1;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        @p st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, lane;
        }""",
        "=r,l,r,~{memory}",
        [p_next, i_next],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def offer_slot(dq_sum, slot, ready, p_next, i_sum, i_tile, has_sum):
    """Let the consumer have a slot; where it is to write dq, with the sum of the key tiles before in it."""
    if has_sum:
        await_order(p_next + i_sum, i_tile)
        mbarrier.expect(ready, dq_sum.block_type.nbytes)
        tma_load(dq_sum, [i_sum * dq_sum.block_shape[0], 0], ready, slot)
    else:
        mbarrier.arrive(ready)


@gluon.jit
def adder(dq, dq_sum, p_next, program, i_slot: gl.constexpr, BLOCKS: gl.constexpr):
    """One warp: adds every second dq tile of its program to the workspace, in order, or writes it to dq."""
    BM: gl.constexpr = BLOCKS.q
    BD: gl.constexpr = BLOCKS.columns
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes
    slot = buffers.dq.index(i_slot)
    ready = barriers.dq_ready.index(i_slot)
    n_m = gl.cdiv(sizes.T, BM)

    before = 0  # steps of the key tiles before
    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 1)
    while tile.i_tile >= 0:
        n_steps = (tile.end - tile.start) * sizes.G
        i_bh = tile.i_b * sizes.H
        i_step = (before + i_slot) % SLOTS
        if i_step < n_steps:
            i_h, i_m = place(i_step, tile)
            i_sum = (i_bh + i_h) * n_m + i_m
            offer_slot(dq_sum, slot, ready, p_next, i_sum, tile.i_tile, (i_m < tile.last) & (i_m < tile.first))
        while i_step < n_steps:
            i_h, i_m = place(i_step, tile)
            i_sum = (i_bh + i_h) * n_m + i_m
            # `place` divides: done here, while there is nothing to add yet.
            next_h, next_m = place(i_step + SLOTS, tile)
            next_waits = (next_m < tile.last) & (next_m < tile.first)
            mbarrier.wait(barriers.dq_full.index(i_slot), ((before + i_step) // SLOTS) & 1)
            if i_m < tile.last:
                b_dq = reinterpret(slot, dq.dtype, [2, 1, 1, BM, BD], dq.layout).index(0)
                tma_store(dq, [tile.i_b, i_h, i_m * BM, 0], b_dq)
            elif i_m >= tile.first:  # the first stores, so that nobody has to set the workspace to zero
                tma_store(dq_sum, [i_sum * dq_sum.block_shape[0], 0], slot)
            else:
                await_order(p_next + i_sum, tile.i_tile)
                tma_add(dq_sum, [i_sum * dq_sum.block_shape[0], 0], slot)
            tma.store_wait(0)
            # The slot is free before the next tile may add, which takes longer.
            i_step += SLOTS
            if (i_step < n_steps) & (not next_waits):
                mbarrier.arrive(ready)
            if i_m >= tile.last:
                allow_next(p_next + i_sum, tile.i_tile + 1)
            if (i_step < n_steps) & next_waits:
                offer_slot(dq_sum, slot, ready, p_next, (i_bh + next_h) * n_m + next_m, tile.i_tile, True)
        before += n_steps
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 1)
