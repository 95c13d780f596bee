"""The roles of the backward kernel that feed the consumer: they bring tiles, take dk and dv away, and draw masks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .backward_pipeline import HALF, half_of, hand_out, next_tile, place
from .dropout import draw_transposed, load_key


@gluon.jit
def producer(
    q, k, v, do, lse2, delta, parts, p_work, inputs, scalars, buffers, barriers, sizes,
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
    tile = hand_out(p_work, i_round, inputs, scalars, buffers, barriers, sizes, BLOCKS, MODE)
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
            if BLOCKS.rows_in_products:
                mbarrier.expect(full, 2 * q.block_type.nbytes + parts.block_type.nbytes)
                i_row = (i_bh * gl.cdiv(sizes.T, BM) + i_tile_m) * BM
                tma.async_copy_global_to_shared(parts, [i_row, 0], full, buffers.parts.index(i_s))
            else:
                mbarrier.expect(full, 2 * q.block_type.nbytes + 2 * lse2.block_type.nbytes)
                tma.async_copy_global_to_shared(lse2, [i_bh, i_m], full, buffers.lse2.index(i_s))
                tma.async_copy_global_to_shared(delta, [i_bh, i_m], full, buffers.delta.index(i_s))
            tma.async_copy_global_to_shared(q, [tile.i_b, i_h, i_m, 0], full, b_q)
            tma.async_copy_global_to_shared(do, [tile.i_b, i_h, i_m, 0], full, b_do)
            i_step += 1
        i_round += 1
        tile = hand_out(p_work, i_round, inputs, scalars, buffers, barriers, sizes, BLOCKS, MODE)


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


@gluon.jit
def drawer(inputs, buffers, barriers, sizes, BLOCKS: gl.constexpr):
    """Four warps: draw dropout's words for every step, while the consumer is at work on the steps before."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    STAGES: gl.constexpr = BLOCKS.stages

    i_step = 0
    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 4)
    while tile.i_tile >= 0:
        for i in range((tile.end - tile.start) * sizes.G):
            i_h, i_tile_m = place(i, tile)
            key = load_key(inputs.key, tile.i_b, i_h)
            i_s = i_step % STAGES
            for j in gl.static_range(BM // HALF):
                half = half_of(i_tile_m * BM, i_s, j, buffers, BLOCKS)
                b_w = draw_transposed(key, half.i_m, tile.i_tile * BN, HALF, BN, 4)
                mbarrier.wait(barriers.empty.index(i_s), ((i_step // STAGES) & 1) ^ 1)
                half.words.store(b_w)
            mbarrier.arrive(barriers.words_full.index(i_s))
            i_step += 1
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 4)
