"""The roles of the backward kernel that feed the consumer: they bring tiles, take dk and dv away, and draw masks."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..score import locate
from .added import prefetch_pairs
from .backward_pipeline import hand_out, next_tile, place, row_stride
from .compat import reinterpret, tma_load, tma_store
from .dropout import draw_transposed, load_key
from .schedule import query_tiles
from .stages import stage_of, wait_empty, wait_full


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
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    dtype: gl.constexpr = q.dtype
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    tile = hand_out(p_work, i_round, program, BLOCKS, MODE)
    while tile.i_tile >= 0:
        stage = stage_of(i_round, KEY_STAGES)
        full = barriers.kv_full.index(stage.index)
        position = [tile.i_b, tile.i_h // sizes.G, tile.i_tile * BN, 0]
        b_k = reinterpret(buffers.k.index(stage.index), dtype, [1, 1, BN, BD], k.layout)
        b_v = reinterpret(buffers.v.index(stage.index), dtype, [1, 1, BN, BD], v.layout)
        wait_empty(barriers.kv_empty, stage)
        mbarrier.expect(full, 2 * k.block_type.nbytes)
        tma_load(k, position, full, b_k)
        tma_load(v, position, full, b_v)
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
            b_q = reinterpret(buffers.q.index(stage.index), dtype, [1, 1, BM, BD], q.layout)
            b_do = reinterpret(buffers.do.index(stage.index), dtype, [1, 1, BM, BD], do.layout)
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
            tma_load(q, [tile.i_b, i_h, i_m, 0], full, b_q)
            tma_load(do, [tile.i_b, i_h, i_m, 0], full, b_do)
            if BLOCKS.writes_ds:
                write_zeros(ds, unseen, i * n_unseen, n_unseen, tile, program, BLOCKS)
            i_step += 1
        i_round += 1
        tile = hand_out(p_work, i_round, program, BLOCKS, MODE)


@gluon.jit
def writer(dk, dv, program, BLOCKS: gl.constexpr):
    """One warp: takes dk and dv away, which the consumer puts where k and v were."""
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 1)
    while tile.i_tile >= 0:
        stage = stage_of(i_round, KEY_STAGES)
        position = [tile.i_b, tile.i_h // sizes.G, tile.i_tile * BN, 0]
        b_dk = reinterpret(buffers.k.index(stage.index), dk.dtype, [1, 1, BN, BD], dk.layout)
        b_dv = reinterpret(buffers.v.index(stage.index), dv.dtype, [1, 1, BN, BD], dv.layout)
        wait_full(barriers.dkdv_full, stage)
        tma_store(dk, position, b_dk)
        tma_store(dv, position, b_dv)
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
