"""The forward kernel of attention.precision=fp8: hopper/forward.py with both products in e4m3.

k and v come as `quantise` leaves them (hopper/fp8.py): 8-bit values, and a scale for each tile. The producer, the
pipeline and the schedule are those of hopper/forward.py. What differs:

- q is read once, so each consumer rotates and rounds its queries (hopper/fp8_queries.py), and keeps them in registers.
- The tensor cores take v in rows of keys, so it is stored transposed, with the keys of each row in the order in which a
  thread holds its weights. No weight changes threads between the two products.
- A key tile's scale of v goes into the exponent of its weights: p v = 2^(s + log2(scale) - m) v8. l divides it out.
- Weights are not exponentials (hopper/fp8_weights.py), and l is the sum of the rounded weights: a product with ones,
  which like the product with v comes one tile later than the maximum.
"""

from typing import Any, NamedTuple

import torch
import triton
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
from triton.language.extra.cuda import gdc_wait

from ...gpu import multiprocessors
from ..call import KernelCall
from ..forward import without_keys
from ..score import locate, sees_key
from ..tiles import Rows, head_bytes, head_group_size, launch_scalars, mode_of, rows_like, store_lse
from .compat import reinterpret, tma_store
from .configs import ForwardBlocks, fp8_blocks
from .forward_pipeline import allocate, next_work, producer, skip
from .fp8 import HALF, Quantised, quantise, rotation
from .fp8_queries import load_rotation, rotated_queries
from .fp8_weights import GROWTH, OFFSET, allocate_ones, approximate, as_operand, release, weights
from .schedule import Program, Sizes, key_tiles
from .softmax import ROWS, new_maximum, rescale, row_max
from .stages import stage_of, wait_full
from .tiles import fp8_tiles, tiles


class Constants(NamedTuple):
    """Operands in shared memory: ones for the sums of weights, and the left half of R with its barrier."""

    ones: Any
    rotation: Any
    rotation_full: Any


@gluon.jit
def masked(b_s, i_m, i_n, pos, MODE: gl.constexpr, N: gl.constexpr):
    """Scores (ROWS, N) with -inf where a query does not see a key."""
    o_m = i_m + gl.arange(0, ROWS, gl.SliceLayout(1, b_s.type.layout))[:, None]
    o_n = i_n + gl.arange(0, N, gl.SliceLayout(0, b_s.type.layout))[None, :]
    return gl.where(sees_key(o_m, o_n, (0, 0), pos, MODE), b_s, -float("inf"))


@gluon.jit
def load_scales(p_kv, i_tile):
    """(scale of k, log2 of the scale of v) of a key tile."""
    return gl.load(p_kv + 2 * i_tile), gl.load(p_kv + 2 * i_tile + 1)


class State(NamedTuple):
    """What a consumer carries from one key tile to the next.

    o, l    the sums of weights times values, and of weights, of the tiles before the last one
    p       the weights of the last tile, before they are rounded
    m       the maximum of each row
    scales  of k and log2 of that of v in the next tile, and the latter in the last one
    """

    o: Any
    p: Any
    m: Any
    l: Any
    scales: Any


class Queries(NamedTuple):
    """A consumer's 64 queries from i_m in 8 bits, with their scales, and the scales of the keys that they see."""

    b_q: Any
    scale: Any
    i_m: Any
    pos: Any
    p_kv: Any


@gluon.jit
def step(state, i_step, i_tile, is_cut, queries, ones, buffers, barriers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """o += p v of the tile before, during the scores and the softmax of a key tile: the State after it.

    The keys of this step have arrived when it starts, and those of the next when it ends.
    """
    o, b_p32, m, l, scales = state
    BN: gl.constexpr = BLOCKS.k
    S_LAYOUT: gl.constexpr = m.type.layout.parent
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 4)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    stage = stage_of(i_step, BLOCKS.stages)

    zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    b_k = buffers.k.index(stage.index).permute((1, 0))
    s_flight = warpgroup_mma(queries.b_q, b_k, zeros, use_acc=False, is_async=True)
    b_p = as_operand(b_p32, BN, P_LAYOUT)
    o_flight = warpgroup_mma(b_p, buffers.v.index(stage.index).permute((1, 0)), o, is_async=True)
    l_flight = warpgroup_mma(b_p, ones, gl.zeros_like(l), use_acc=False, is_async=True)
    scale_k, log2_v, log2_v_before = scales
    next_k, next_v = load_scales(queries.p_kv, gl.maximum(i_tile - 1, 0))
    scale = queries.scale * scale_k
    b_s = warpgroup_mma_wait(2, deps=(s_flight,))
    if is_cut:
        b_s = masked(b_s, queries.i_m, i_tile * BN, queries.pos, MODE, BN)

    m_tile = gl.convert_layout(row_max(b_s, BN, BLOCKS), m.type.layout) * scale + log2_v
    m_new, m_safe, alpha = new_maximum(m, m_tile, GROWTH)
    b_p32 = weights(b_s, scale, log2_v + OFFSET - m_safe)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    wait_full(barriers.kv_full, stage_of(i_step + 1, BLOCKS.stages))
    o, l_tile = warpgroup_mma_wait(0, deps=(o_flight, l_flight))
    release(b_p)
    mbarrier.arrive(barriers.kv_empty.index(stage.index))
    l = (l + l_tile * gl.exp2(-log2_v_before)) * gl.convert_layout(alpha, L_ROWS)[:, None]
    o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    return State(o, b_p32, m_new, l, (next_k, next_v, log2_v))


@gluon.jit
def first_tile(i_step, n_end, scales, queries, buffers, barriers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The State after the last tile of keys that the queries see, number n_end - 1, of these scales; o and l are zero.

    The keys of the next step have arrived when it ends.
    """
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 32])
    L_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    scale_k, log2_v = scales
    # The diagonal cuts this tile, or the end of the sequence.
    stage = stage_of(i_step, BLOCKS.stages)
    wait_full(barriers.kv_full, stage)
    zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    b_k = buffers.k.index(stage.index).permute((1, 0))
    s_flight = warpgroup_mma(queries.b_q, b_k, zeros, use_acc=False, is_async=True)
    scale = queries.scale * scale_k
    next_k, next_v = load_scales(queries.p_kv, gl.maximum(n_end - 2, 0))
    b_s = warpgroup_mma_wait(0, deps=(s_flight,))
    mbarrier.arrive(barriers.kv_empty.index(stage.index))
    b_s = masked(b_s, queries.i_m, (n_end - 1) * BN, queries.pos, MODE, BN)
    m = gl.convert_layout(row_max(b_s, BN, BLOCKS), S_ROWS) * scale + log2_v
    m_safe = gl.where(m == -float("inf"), 0.0, m)
    b_p32 = weights(b_s, scale, log2_v + OFFSET - m_safe)
    l = gl.zeros([ROWS, 8], gl.float32, L_LAYOUT)
    o = gl.zeros([ROWS, BD], gl.float32, O_LAYOUT)
    wait_full(barriers.kv_full, stage_of(i_step + 1, BLOCKS.stages))
    return State(o, b_p32, m, l, (next_k, next_v, log2_v))


@gluon.jit
def consumer(out, rows, p_kv, constants, program, c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Four warps: out and lse of 64 queries of each tile that the producer hands out."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 4)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_step = 0
    i_round = 0
    mbarrier.wait(constants.rotation_full, 0)
    work = next_work(i_round, buffers, barriers, c, BLOCKS)
    while work.i_h >= 0:
        i_bh = work.i_b * sizes.H + work.i_h
        i_m = work.i_m + c * ROWS
        pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, work.i_b, i_bh, 1)
        _, _, _, n_end_all = key_tiles(work.i_m, pos, CONSUMERS * ROWS, BN, MODE)
        _, _, n_full, n_end = key_tiles(i_m, pos, ROWS, BN, MODE)
        p_kv_head = p_kv + work.i_kv * gl.cdiv(sizes.S, BN) * 2
        scales = load_scales(p_kv_head, n_end - 1)
        wait_full(barriers.q_full, work.stage)
        b_q, scale_q = rotated_queries(buffers.q.index(work.stage.index), constants.rotation, Q_LAYOUT, BD)
        mbarrier.arrive(barriers.q_empty.index(work.stage.index))
        scale_q = gl.convert_layout(scale_q, S_ROWS) * program.scalars.scale_log2
        queries = Queries(b_q, scale_q, i_m, pos, p_kv_head)
        i_step, _ = skip(i_step, 0, n_end_all - n_end, barriers, c, BLOCKS)
        state = first_tile(i_step, n_end, scales, queries, buffers, barriers, BLOCKS, MODE)
        i_step += 1

        for j in range(1, n_end):
            i_tile_n = n_end - 1 - j
            is_cut = i_tile_n >= n_full
            state = step(state, i_step, i_tile_n, is_cut, queries, constants.ones, buffers, barriers, BLOCKS, MODE)
            i_step += 1

        o, b_p32, m, l, scales = state
        b_p = as_operand(b_p32, BN, P_LAYOUT)
        stage = stage_of(i_step, BLOCKS.stages)
        o_flight = warpgroup_mma(b_p, buffers.v.index(stage.index).permute((1, 0)), o, is_async=True)
        l_flight = warpgroup_mma(b_p, constants.ones, gl.zeros_like(l), use_acc=False, is_async=True)
        i_round += 1  # while the last products run
        following = next_work(i_round, buffers, barriers, c, BLOCKS)
        o, l_tile = warpgroup_mma_wait(0, deps=(o_flight, l_flight))
        release(b_p)
        release(b_q)
        mbarrier.arrive(barriers.kv_empty.index(stage.index))
        l_row = gl.convert_layout(gl.max(l + l_tile * gl.exp2(-scales[2]), 1), S_ROWS)  # all columns are the same
        lse2 = m - OFFSET + approximate("lg2", l_row)
        i_step += 1

        inverse = gl.convert_layout(approximate("rcp", l_row), O_ROWS)
        if MODE.causal:  # rows that see no key are zero; scores of -inf give l = 0 too
            inverse = gl.where(i_m + gl.arange(0, ROWS, O_ROWS) >= sizes.T - sizes.S, inverse, 0.0)
        o = o * inverse[:, None]
        b_out = buffers.out.index(c)
        tma.store_wait(0)
        b_out.store(o.to(out.dtype))
        fence_async_shared()
        b_out = reinterpret(b_out, out.dtype, [1, 1, ROWS, BD], out.layout)
        tma_store(out, [work.i_b, work.i_h, i_m, 0], b_out)
        store_lse(rows, lse2, i_bh, sizes.T, i_m + gl.arange(0, ROWS, S_ROWS))
        work = following
    tma.store_wait(0)


@gluon.jit
def fp8_forward_kernel(q, k, v, r, out, rows, p_kv, inputs, p_work, scalars, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """out and lse of all tiles of queries. Grid: at most a program for each multiprocessor."""
    REGISTERS: gl.constexpr = BLOCKS.registers
    constants = Constants(allocate_ones(BLOCKS.k, v.dtype), *load_rotation(r, BLOCKS.columns))
    buffers, barriers = allocate(q, v, out, BLOCKS, MODE)
    H, T = q.shape[1], q.shape[2]
    n_tiles = gl.cdiv(T, BLOCKS.consumers * ROWS)
    sizes = Sizes(H, H // k.shape[1], T, k.shape[2], n_tiles, q.shape[0] * H, scalars.n_together >> 2)
    gdc_wait()  # until `quantise_kernel` is done: this one is launched before
    # Gluon takes the roles as a literal: two consumers. The first has the warps of the launch and the registers left.
    gl.warp_specialize(
        [
            (
                consumer,
                (out, rows, p_kv, constants, Program(inputs, scalars, buffers, barriers, sizes), 0, BLOCKS, MODE),
            ),
            (
                consumer,
                (out, rows, p_kv, constants, Program(inputs, scalars, buffers, barriers, sizes), 1, BLOCKS, MODE),
            ),
            (producer, (q, k, v, None, p_work, Program(inputs, scalars, buffers, barriers, sizes), BLOCKS, MODE)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: KernelCall) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D) -> lse and lse2; fills out, like q. All as in the plain forward."""
    if out.numel() == 0 or k.shape[2] == 0:
        return without_keys(out, q.new_empty(q.shape[:3], dtype=torch.float32), rows_like(q), None)
    blocks = fp8_blocks(q.shape[-1])
    return attend(q, quantise(k, v, blocks), out, call, blocks)


def attend(q: Tensor, x: Quantised, out: Tensor, call: KernelCall, blocks: ForwardBlocks) -> tuple[Tensor, Tensor]:
    """`forward` of keys and values that are quantised already."""
    B, H, T, _ = out.shape
    H_kv = x.k.shape[1]
    lse, lse2 = out.new_empty(B, H, T, dtype=torch.float32), rows_like(out)
    n_m = triton.cdiv(T, blocks.consumers * ROWS.value)
    # Half of the heads that fit the budget: 0.5% faster from 4,096 tokens on.
    n_together = max(1, head_group_size(B * H, head_bytes(x.k), H // H_kv) // 2)
    n_programs = multiprocessors(out.device)
    # Rotating q and k has made their products as many times larger as they have columns.
    rotated = call._replace(spec=call.spec._replace(scale=call.spec.scale / blocks.columns))
    fp8_forward_kernel[(min(n_programs, n_m * B * H),)](
        tiles(q, ROWS.value, blocks.columns),
        fp8_tiles(x.k, blocks.k, blocks.columns),
        fp8_tiles(x.v, blocks.columns, blocks.k),
        tiles(rotation(blocks.columns, q.dtype, q.device), HALF.value, HALF.value),
        tiles(out, ROWS.value, blocks.columns),
        Rows(lse, lse2),
        x.scales,
        call.inputs,
        x.work,
        launch_scalars(rotated, n_together),
        BLOCKS=blocks,
        MODE=mode_of(call, out),
        num_warps=4,
        launch_pdl=True,  # see gdc_wait
        enable_fp_fusion=True,
    )
    return lse, lse2
