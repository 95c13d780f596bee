"""Shared memory of the backward kernel: tiles that its roles exchange, and barriers that signal when they are filled.

The producer hands out key tiles and fills stages, and the consumer empties them. The consumer fills slots of dq, and
the adders empty them. The phase of a barrier is the parity of the number of waits for it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..score import locate
from ..tiles import swizzle
from .dropout import WORDS_IN_SHARED_MEMORY
from .key_numbers import split
from .schedule import query_tiles

SLOTS = gl.constexpr(2)  # of dq in shared memory
WIDTH = gl.constexpr(256)  # of a row of the workspace: a value for each of the consumer's threads
PARTS = gl.constexpr(16)  # columns of the smallest product: three parts of lse2 and of delta, and zeros


class Buffers(NamedTuple):
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


class Barriers(NamedTuple):
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
    high, middle, low = split(b_x)
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
    buffers = Buffers(
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
