"""The backward kernel on Hopper: five products, where the plain backward's two passes make seven.

A program has a tile of keys and walks over the query tiles that see it, the last first. dk and dv stay with it. What a
step gives dq goes into a workspace of fp32 numbers in device memory, where many key tiles add to one query tile. They
add **in turn**, in the order of the key tiles, so that gradients stay bitwise reproducible: a counter for each query
tile says whose turn it is. A program waits only for key tiles before its own. It takes its number from a counter when
it starts, so whatever it waits for is running already. The order of the tiles is that of DASH (arXiv:2601.21824).

    producer   one warp: brings q, do, lse2 and delta of the next query tile
    consumer   eight warps: s, p, dp, ds; dv += p^T do, dk += ds^T q, and dq = ds k into a slot of shared memory
    adders     two warps, a slot each: wait for their turn and have the copy engine add dq to the workspace

The last key tile that a query tile sees adds nothing: it gets the sum of the others in its slot, and writes dq.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
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

from .. import tiles as plain
from ..configs import Options
from .compat import barrier, tma_add
from .configs import BackwardBlocks
from .dropout import draw_transposed, drop_transposed, load_key
from .forward import LOG2_E
from .schedule import Sizes, locate, query_tiles
from .tiles import matrix, row_tiles, tiles

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
    """A program's work: key tile i_tile of a key/value head, whose first query head is i_h of sequence i_b."""

    i_tile: Any
    i_b: Any
    i_kv: Any
    i_h: Any


@gluon.jit
def producer(q, k, v, do, lse2, delta, tile, buffers, barriers, sizes, CAUSAL: gl.constexpr, BLOCKS: gl.constexpr):
    """One warp: brings k and v once, and q, do, lse2 and delta of every query tile."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    dtype: gl.constexpr = q.dtype
    m_start, _, _, m_end = query_tiles(tile.i_tile, sizes, CAUSAL, BM, BN)

    mbarrier.expect(barriers.kv, 2 * k.block_type.nbytes)
    position = [tile.i_b, tile.i_kv, tile.i_tile * BN, 0]
    tma.async_copy_global_to_shared(k, position, barriers.kv, buffers.k._reinterpret(dtype, [1, 1, BN, BD], k.layout))
    tma.async_copy_global_to_shared(v, position, barriers.kv, buffers.v._reinterpret(dtype, [1, 1, BN, BD], v.layout))
    i_step = 0
    for i_h in range(tile.i_h, tile.i_h + sizes.G):
        i_bh = tile.i_b * sizes.H + i_h
        for j in range(m_end - m_start):
            i_m = (m_end - 1 - j) * BM
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


@gluon.jit
def await_turn(p_turn, turn):
    """Spin until the counter says `turn`; what was added before is then visible to the copy engine."""
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
        [p_turn, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_turn(p_turn, turn):
    """Wait until what this warp added is in device memory, and not only read from shared memory; then hand over."""
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
        [p_turn, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def offer_slot(dq_sum, slot, ready, p_turn, i_sum, i_tile, is_last):
    """Let the consumer have a slot; with the sum of the key tiles before in it, if the consumer is to write dq."""
    if is_last & (i_tile > 0):
        await_turn(p_turn + i_sum, i_tile)
        mbarrier.expect(ready, dq_sum.block_type.nbytes)
        tma.async_copy_global_to_shared(dq_sum, [i_sum * dq_sum.block_shape[0], 0], ready, slot)
    else:
        mbarrier.arrive(ready)


@gluon.jit
def adder(
    dq, dq_sum, p_turn, tile, buffers, barriers, sizes, i_slot: gl.constexpr, CAUSAL: gl.constexpr, BLOCKS: gl.constexpr
):
    """One warp: adds every second dq tile of its program to the workspace, each in its turn, or writes it to dq."""
    BM: gl.constexpr = BLOCKS.q
    BD: gl.constexpr = BLOCKS.columns
    slot = buffers.dq.index(i_slot)
    ready = barriers.dq_ready.index(i_slot)
    i_tile = tile.i_tile
    m_start, m_last, _, m_end = query_tiles(i_tile, sizes, CAUSAL, BM, BLOCKS.k)
    n_tiles = m_end - m_start
    n_steps = n_tiles * sizes.G
    i_bh = tile.i_b * sizes.H + tile.i_h

    i_step = n_steps * 0 + i_slot
    if i_step < n_steps:
        i_m = m_end - 1 - i_step % n_tiles
        i_sum = (i_bh + i_step // n_tiles) * m_end + i_m
        offer_slot(dq_sum, slot, ready, p_turn, i_sum, i_tile, i_m < m_last)
    while i_step < n_steps:
        i_h = i_step // n_tiles
        i_m = m_end - 1 - i_step % n_tiles
        i_sum = (i_bh + i_h) * m_end + i_m
        mbarrier.wait(barriers.dq_full.index(i_slot), (i_step // SLOTS) & 1)
        if i_m < m_last:
            b_dq = slot._reinterpret(dq.dtype, [1, 1, BM, BD], dq.layout)
            tma.async_copy_shared_to_global(dq, [tile.i_b, tile.i_h + i_h, i_m * BM, 0], b_dq)
        else:
            await_turn(p_turn + i_sum, i_tile)
            if i_tile == 0:  # the first stores, so that nobody has to set the workspace to zero
                tma.async_copy_shared_to_global(dq_sum, [i_sum * dq_sum.block_shape[0], 0], slot)
            else:
                tma_add(dq_sum, [i_sum * dq_sum.block_shape[0], 0], slot)
        tma.store_wait(0)
        # The slot is free before the turn is passed, which takes longer.
        i_step += SLOTS
        next_m = m_end - 1 - i_step % n_tiles
        next_sum = (i_bh + i_step // n_tiles) * m_end + next_m
        next_waits = (next_m < m_last) & (i_tile > 0)
        if (i_step < n_steps) & (not next_waits):
            mbarrier.arrive(ready)
        if i_m >= m_last:
            pass_turn(p_turn + i_sum, i_tile + 1)
        if (i_step < n_steps) & next_waits:
            offer_slot(dq_sum, slot, ready, p_turn, next_sum, i_tile, True)


@gluon.jit
def step(
    b_dk, b_dv, p_key, i_b, i_h, i_step, i_m, i_n, is_cut, is_last, scale, buffers, barriers, sizes,
    CAUSAL: gl.constexpr, THRESHOLD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Keys and values at i_n collect their gradients from queries at i_m, which get theirs through a slot."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    # Warps of the dq tile (BM, BD) along its rows and columns; each has DN columns.
    WM: gl.constexpr = BM // 16
    WN: gl.constexpr = 8 // WM
    DN: gl.constexpr = BD // WN
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WN], [16, DN, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_dk.type.layout, 2)
    KEEP_SCALE: gl.constexpr = 256 / (256 - THRESHOLD)
    dtype: gl.constexpr = buffers.q.dtype
    i_s = i_step % STAGES
    q_s = buffers.q.index(i_s)
    do_s = buffers.do.index(i_s)

    # (BN, BM): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    mbarrier.wait(barriers.full.index(i_s), (i_step // STAGES) & 1)
    zeros = gl.zeros([BN, BM], gl.float32, S_LAYOUT)
    s_flight = warpgroup_mma(buffers.k, q_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp_flight = warpgroup_mma(buffers.v, do_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if THRESHOLD:  # the key is loaded again in each step: there are no registers to keep it in
        key = load_key(p_key, i_b, i_h)
        b_w = draw_transposed(key, i_m, i_n, BM, BN)
    b_s = warpgroup_mma_wait(1, deps=(s_flight,))
    if is_cut:
        o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, S_LAYOUT))
        o_m = i_m + gl.arange(0, BM, gl.SliceLayout(0, S_LAYOUT))
        m_s = (o_n + (sizes.T - sizes.S))[:, None] <= o_m[None, :] if CAUSAL else (o_n < sizes.S)[:, None]
        b_s = gl.where(m_s, b_s, -float("inf"))
    b_p = gl.exp2(b_s * (scale * LOG2_E) - buffers.lse2.index(i_s).load(S_LAYOUT))
    b_p_kept = gl.convert_layout(b_p.to(dtype), P_LAYOUT)
    if THRESHOLD:
        b_p_kept = drop_transposed(b_p_kept, b_w, THRESHOLD, BM, BN)
    dv_flight = warpgroup_mma(b_p_kept, do_s, b_dv, is_async=True)
    b_dp = warpgroup_mma_wait(1, deps=(dp_flight,))
    b_delta = buffers.delta.index(i_s).load(S_LAYOUT)
    if THRESHOLD:
        # b_p_kept still holds what dropout kept: the mask need not be applied to dp as well.
        b_ds32 = gl.convert_layout(b_p_kept, S_LAYOUT).to(gl.float32) * b_dp - b_p * b_delta
    else:
        b_ds32 = b_p * (b_dp - b_delta)
    b_ds = b_ds32.to(dtype)
    buffers.ds.store(b_ds)
    b_ds = gl.convert_layout(b_ds, P_LAYOUT)
    dk_flight = warpgroup_mma(b_ds, q_s, b_dk, is_async=True)
    b_dv, b_p_kept = warpgroup_mma_wait(1, deps=(dv_flight, b_p_kept))
    fence_async_shared()
    barrier()
    zeros_dq = gl.zeros([BM, BD], gl.float32, DQ_LAYOUT)
    dq_flight = warpgroup_mma(buffers.ds.permute((1, 0)), buffers.k, zeros_dq, use_acc=False, is_async=True)
    b_dk, b_dq, b_ds = warpgroup_mma_wait(0, deps=(dk_flight, dq_flight, b_ds))
    mbarrier.arrive(barriers.empty.index(i_s))

    # The workspace holds a tile in the order of the registers, and nothing is shuffled: (registers, threads).
    i_slot = i_step % SLOTS
    slot = buffers.dq.index(i_slot)
    mbarrier.wait(barriers.dq_ready.index(i_slot), (i_step // SLOTS) & 1)
    b_dq = b_dq.reshape([WM, 2, 8, WN, DN // 8, 4, 2]).permute((4, 3, 0, 2, 5, 1, 6)).reshape([BM * BD // WIDTH, WIDTH])
    if is_last & (i_n > 0):
        b_dq = b_dq + slot.load(b_dq.type.layout)
        barrier()
    if is_last:
        b_dq16 = (b_dq * (scale * KEEP_SCALE)).to(dtype).reshape([DN // 8, WN, WM, 8, 4, 2, 2])
        b_dq16 = gl.convert_layout(b_dq16.permute((2, 5, 3, 1, 0, 4, 6)).reshape([BM, BD]), DQ_LAYOUT)
        slot._reinterpret(dtype, [BM, BD], buffers.q.layout).store(b_dq16)
    else:
        slot.store(b_dq)
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(i_slot))
    return b_dk, b_dv


@gluon.jit
def consumer(
    dk, dv, p_key, scale, tile, buffers, barriers, sizes,
    CAUSAL: gl.constexpr, THRESHOLD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Eight warps: dk and dv of a tile of keys, summed over the G query heads that share it, and all its dq tiles."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BD, 16])
    KEEP_SCALE: gl.constexpr = 256 / (256 - THRESHOLD)
    dtype: gl.constexpr = dk.dtype
    i_n = tile.i_tile * BN
    m_start, m_last, m_full, m_end = query_tiles(tile.i_tile, sizes, CAUSAL, BM, BN)

    b_dk = gl.zeros([BN, BD], gl.float32, LAYOUT)
    b_dv = gl.zeros([BN, BD], gl.float32, LAYOUT)
    mbarrier.wait(barriers.kv, 0)
    i_step = 0
    for i_h in range(tile.i_h, tile.i_h + sizes.G):
        for j in range(m_start, m_end):
            i_m = m_end - 1 + m_start - j
            b_dk, b_dv = step(
                b_dk, b_dv, p_key, tile.i_b, i_h, i_step, i_m * BM, i_n, i_m < m_full, i_m < m_last, scale,
                buffers, barriers, sizes, CAUSAL, THRESHOLD, BLOCKS,
            )  # fmt: skip
            i_step += 1
    buffers.k.store((b_dk * (scale * KEEP_SCALE)).to(dtype))
    buffers.v.store((b_dv * KEEP_SCALE).to(dtype))
    fence_async_shared()
    position = [tile.i_b, tile.i_kv, i_n, 0]
    tma.async_copy_shared_to_global(dk, position, buffers.k._reinterpret(dtype, [1, 1, BN, BD], dk.layout))
    tma.async_copy_shared_to_global(dv, position, buffers.v._reinterpret(dtype, [1, 1, BN, BD], dv.layout))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "G", "T", "S", "n_n", "n_heads", "n_together"])
def backward_kernel(
    q, k, v, do, dq, dk, dv, lse2, delta, dq_sum, p_turn, p_work, p_key, scale, H, G, T, S, n_n, n_heads, n_together,
    CAUSAL: gl.constexpr, THRESHOLD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """dq, dk and dv. Grid: n_n tiles of keys x n_heads, batch x key/value heads."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q.dtype
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BD], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BM, BD], q_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], delta.layout),
        gl.allocate_shared_memory(dtype, [BN, BM], ds_layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BM * BD // WIDTH, WIDTH], dq_sum.layout),
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

    sizes = Sizes(H, G, T, S, n_n, n_heads, n_together)
    i_tile, i_bkv = locate(gl.atomic_add(p_work, 1), sizes)
    i_kv = i_bkv % (H // G)
    tile = KeyTile(i_tile, i_bkv // (H // G), i_kv, i_kv * G)
    gl.warp_specialize(
        [
            (consumer, (dk, dv, p_key, scale, tile, buffers, barriers, sizes, CAUSAL, THRESHOLD, BLOCKS)),
            (producer, (q, k, v, do, lse2, delta, tile, buffers, barriers, sizes, CAUSAL, BLOCKS)),
            (adder, (dq, dq_sum, p_turn, tile, buffers, barriers, sizes, 0, CAUSAL, BLOCKS)),
            (adder, (dq, dq_sum, p_turn, tile, buffers, barriers, sizes, 1, CAUSAL, BLOCKS)),
        ],
        [1, 1, 1],
        [24, 24, 24],
    )


@triton.jit(do_not_specialize=["H", "T", "n_m"])
def delta_kernel(out, do, p_delta, p_turn, p_work, H, T, n_m, BM: tl.constexpr, BD: tl.constexpr, KEEP: tl.constexpr):
    """delta of one tile of queries, less dropout's rescaling; sets the counters of the kernel that follows to zero.

    Grid: n_m tiles x batch x heads.
    """
    i_bh, i_m = tl.program_id(0) // n_m, tl.program_id(0) % n_m * BM
    b_do = plain.load_tile(do, i_bh // H, i_bh % H, i_m, BM, BD).to(tl.float32)
    b_out = plain.load_tile(out, i_bh // H, i_bh % H, i_m, BM, BD).to(tl.float32)
    o_m = i_m + tl.arange(0, BM)
    p_row = p_delta + i_bh.to(tl.int64) * tl.cdiv(T, plain.ROW_ALIGNMENT) * plain.ROW_ALIGNMENT
    tl.store(p_row + o_m, tl.sum(b_out * b_do, 1) * KEEP, mask=o_m < T)
    tl.store(p_turn + tl.program_id(0), 0)
    tl.store(p_work, 0, mask=tl.program_id(0) == 0)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    key: Tensor | None,
    options: Options,
    blocks: BackwardBlocks,
) -> None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills the gradients dq, dk, dv, of the shapes of q, k, v."""
    dq, dk, dv = gradients
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    G = H // H_kv
    n_m, n_n = triton.cdiv(T, blocks.q), triton.cdiv(S, blocks.k)
    if options.causal:  # what no key tile writes: queries that see nothing
        dq[:, :, : max(T - S, 0)].zero_()
    do = plain.addressable(do)
    delta = plain.rows_like(q)
    turns = q.new_empty(B * H * n_m, dtype=torch.int32)
    work = q.new_empty(1, dtype=torch.int32)
    dq_sum = q.new_empty(B * H * n_m * blocks.q * blocks.columns // WIDTH.value, WIDTH.value, dtype=torch.float32)
    delta_kernel[(B * H * n_m,)](
        plain.tiles(out, blocks.q, blocks.columns),
        plain.tiles(do, blocks.q, blocks.columns),
        delta,
        turns,
        work,
        H,
        T,
        n_m,
        BM=blocks.q,
        BD=blocks.columns,
        KEEP=(256 - options.threshold) / 256,
    )
    backward_kernel[(n_n * B * H_kv,)](
        tiles(q, blocks.q, blocks.columns),
        tiles(k, blocks.k, blocks.columns),
        tiles(v, blocks.k, blocks.columns),
        tiles(do, blocks.q, blocks.columns),
        tiles(dq, blocks.q, blocks.columns),
        tiles(dk, blocks.k, blocks.columns),
        tiles(dv, blocks.k, blocks.columns),
        row_tiles(lse2, T, blocks.q),
        row_tiles(delta, T, blocks.q),
        matrix(dq_sum, blocks.q * blocks.columns // WIDTH.value),
        turns,
        work,
        key,
        options.scale,
        H,
        G,
        T,
        S,
        n_n,
        B * H_kv,
        # Four times what the plain kernels keep together: the next key tile of a head finds more of its turns passed.
        plain.head_group_size(B * H_kv, q[0, :G], shared_by=4),
        CAUSAL=options.causal,
        THRESHOLD=options.threshold,
        BLOCKS=blocks,
        num_warps=8,
    )
