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
from ..backward import sinks_gradient
from ..configs import Extras, Options
from ..score import (
    LOG2_E,
    alibi_bias,
    alibi_row_bias,
    change_scores,
    locate,
    log2_factor,
    soft_cap_tanh,
    times_derivative,
)
from .backward_pipeline import SLOTS, WIDTH, KeyTile, allocate, producer
from .compat import barrier
from .configs import BackwardBlocks
from .dropout import draw_transposed, drop_transposed, load_key
from .schedule import Sizes, query_tiles, seen_by_query, swizzle
from .tiles import matrix, row_tiles, tiles
from .turns import adder


@gluon.jit
def step(
    b_dk, b_dv, i_step, i_h, i_m, i_n, is_cut, is_last, tile, extras, numbers, buffers, barriers,
    BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Keys and values at i_n collect their gradients from queries at i_m, which get theirs through a slot."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    THRESHOLD: gl.constexpr = MODE.threshold
    KEEP_SCALE: gl.constexpr = 256 / (256 - THRESHOLD)
    # Warps of the dq tile (BM, BD) along its rows and columns; each has DN columns.
    WM: gl.constexpr = BM // 16
    WN: gl.constexpr = 8 // WM
    DN: gl.constexpr = BD // WN
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WM, WN], [16, DN, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_dk.type.layout, 2)
    dtype: gl.constexpr = buffers.q.dtype
    at, scale_log2 = tile.at, numbers.scale_log2
    i_s = i_step % STAGES
    q_s = buffers.q.index(i_s)
    do_s = buffers.do.index(i_s)

    # (BN, BM): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    mbarrier.wait(barriers.full.index(i_s), (i_step // STAGES) & 1)
    zeros = gl.zeros([BN, BM], gl.float32, S_LAYOUT)
    s_flight = warpgroup_mma(buffers.k, q_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp_flight = warpgroup_mma(buffers.v, do_s.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if THRESHOLD:  # the key is loaded again in each step: there are no registers to keep it in
        b_w = draw_transposed(load_key(extras.key, tile.i_b, i_h), i_m, i_n, BM, BN)
    o_m = i_m + gl.arange(0, BM, gl.SliceLayout(0, S_LAYOUT))
    o_rows = gl.arange(0, BN, gl.SliceLayout(1, S_LAYOUT))
    slope2 = gl.load(extras.slopes + i_h) * LOG2_E if MODE.alibi else 0.0
    b_s = warpgroup_mma_wait(1, deps=(s_flight,))
    b_tanh = soft_cap_tanh(b_s, scale_log2, MODE) if MODE.soft_cap is not None else None
    b_bias = alibi_bias(slope2, o_m[None, :], o_rows[:, None], i_n, i_n, at, MODE) if MODE.alibi else None
    b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
    if is_cut:
        b_s = gl.where(seen_by_query(i_n + o_rows, o_m[None, :], at, MODE), b_s, -float("inf"))
    b_lse2 = buffers.lse2.index(i_s).load(S_LAYOUT)
    if MODE.alibi:
        b_lse2 += alibi_row_bias(slope2, o_m, i_n, at, MODE)[None, :]
    b_p = gl.exp2(b_s * log2_factor(scale_log2, MODE) - b_lse2)
    b_p_kept = gl.convert_layout(b_p.to(dtype), P_LAYOUT)
    b_p = times_derivative(b_p, b_tanh, MODE)  # so that tanh leaves the registers
    if THRESHOLD:
        b_p_kept = drop_transposed(b_p_kept, b_w, THRESHOLD, BM, BN)
    dv_flight = warpgroup_mma(b_p_kept, do_s, b_dv, is_async=True)
    b_dp = warpgroup_mma_wait(1, deps=(dp_flight,))
    b_delta = buffers.delta.index(i_s).load(S_LAYOUT)
    if THRESHOLD:
        # b_p_kept still holds what dropout kept: the mask need not be applied to dp as well.
        b_kept = gl.convert_layout(b_p_kept, S_LAYOUT)
        if MODE.soft_cap is not None:
            b_ds32 = b_p * (gl.where(b_kept != 0.0, b_dp, 0.0) - b_delta)
        else:
            b_ds32 = b_kept.to(gl.float32) * b_dp - b_p * b_delta
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
    is_first = i_m >= tile.queries.first * BM if MODE.bounded else i_n == 0
    if is_last & (not is_first):
        b_dq = b_dq + slot.load(b_dq.type.layout)
        barrier()
    if is_last:
        b_dq16 = (b_dq * (numbers.scale * KEEP_SCALE)).to(dtype).reshape([DN // 8, WN, WM, 8, 4, 2, 2])
        b_dq16 = gl.convert_layout(b_dq16.permute((2, 5, 3, 1, 0, 4, 6)).reshape([BM, BD]), DQ_LAYOUT)
        slot._reinterpret(dtype, [BM, BD], buffers.q.layout).store(b_dq16)
    else:
        slot.store(b_dq)
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(i_slot))
    return b_dk, b_dv


@gluon.jit
def consumer(dk, dv, extras, numbers, tile, buffers, barriers, sizes, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Eight warps: dk and dv of a tile of keys, summed over the G query heads that share it, and all its dq tiles."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BD, 16])
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    dtype: gl.constexpr = dk.dtype
    i_n = tile.i_tile * BN
    seen = tile.queries

    b_dk = gl.zeros([BN, BD], gl.float32, LAYOUT)
    b_dv = gl.zeros([BN, BD], gl.float32, LAYOUT)
    mbarrier.wait(barriers.kv, 0)
    i_step = 0
    for i_h in range(tile.i_h, tile.i_h + sizes.G):
        for j in range(seen.start, seen.end):
            i_m = seen.end - 1 + seen.start - j
            is_cut = (i_m < seen.full_start) | (i_m >= seen.full_end) if MODE.bounded else i_m < seen.full_start
            b_dk, b_dv = step(
                b_dk, b_dv, i_step, i_h, i_m * BM, i_n, is_cut, i_m < seen.last, tile, extras, numbers,
                buffers, barriers, BLOCKS, MODE,
            )  # fmt: skip
            i_step += 1
    buffers.k.store((b_dk * (numbers.scale * KEEP_SCALE)).to(dtype))
    buffers.v.store((b_dv * KEEP_SCALE).to(dtype))
    fence_async_shared()
    position = [tile.i_b, tile.i_kv, i_n, 0]
    tma.async_copy_shared_to_global(dk, position, buffers.k._reinterpret(dtype, [1, 1, BN, BD], dk.layout))
    tma.async_copy_shared_to_global(dv, position, buffers.v._reinterpret(dtype, [1, 1, BN, BD], dv.layout))
    tma.store_wait(0)


@gluon.jit
def backward_kernel(
    q, k, v, do, dq, dk, dv, lse2, delta, dq_sum, p_turn, p_work, extras, numbers,
    BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """dq, dk and dv. Grid: tiles of keys x batch x key/value heads."""
    BM: gl.constexpr = BLOCKS.q
    BN: gl.constexpr = BLOCKS.k
    buffers, barriers = allocate(q.dtype, lse2, BLOCKS)
    H, H_kv, T, S = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    sizes = Sizes(H, H // H_kv, T, S, gl.cdiv(S, BN), q.shape[0] * H_kv, numbers.n_together >> 2)
    i_tile, i_bkv = swizzle(gl.atomic_add(p_work, 1), sizes)
    i_b, i_kv = i_bkv // H_kv, i_bkv % H_kv
    at = locate(T, S, extras, numbers, i_b)
    tile = KeyTile(i_tile, i_b, i_kv, i_kv * sizes.G, at, query_tiles(i_tile, at, sizes, BM, BN, MODE))
    gl.warp_specialize(
        [
            (consumer, (dk, dv, extras, numbers, tile, buffers, barriers, sizes, BLOCKS, MODE)),
            (producer, (q, k, v, do, lse2, delta, tile, buffers, barriers, sizes, BLOCKS)),
            (adder, (dq, dq_sum, p_turn, tile, buffers, barriers, sizes, 0, BLOCKS)),
            (adder, (dq, dq_sum, p_turn, tile, buffers, barriers, sizes, 1, BLOCKS)),
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
    extras: Extras,
    options: Options,
    blocks: BackwardBlocks,
) -> Tensor | None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills the gradients dq, dk, dv, of the shapes of q, k, v.

    Returns the gradient of the sinks (H,), or None where there are none.
    """
    dq, dk, dv = gradients
    if q.numel() == 0 or k.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return None if extras.sinks is None else torch.zeros_like(extras.sinks)
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    G = H // H_kv
    n_m, n_n = triton.cdiv(T, blocks.q), triton.cdiv(S, blocks.k)
    if T > S or options.q_start is not None:  # then no key tile may see a query tile, and write its dq
        dq.zero_()
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
        extras,
        # Four times what the plain kernels keep together: the next key tile of a head finds more of its turns passed.
        plain.launch_numbers(options, extras, plain.head_group_size(B * H_kv, q[0, :G], shared_by=4)),
        BLOCKS=blocks,
        MODE=plain.kernel_mode(q, options, extras),
        num_warps=8,
    )
    return None if extras.sinks is None else sinks_gradient(extras.sinks, lse2, delta, T, options)
