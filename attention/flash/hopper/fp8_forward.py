"""The forward kernel of attention.precision=fp8: hopper/forward.py with both products in e4m3.

k and v come as `quantise` leaves them (hopper/fp8.py): numbers of 8 bits, and a scale for each tile. The producer, the
pipeline and the schedule are those of hopper/forward.py. What differs:

- q is read once, so each consumer rotates and rounds its own (hopper/fp8_queries.py), and keeps them in registers.
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

from ..call import KernelCall
from ..forward import without_keys
from ..score import LOG2_E, locate
from ..tiles import ROW_ALIGNMENT, head_group_size, launch_scalars, mode_of, rows_like
from .configs import ForwardBlocks, fp8_blocks
from .forward_pipeline import allocate, next_queries, producer, q_stage, skip
from .fp8 import HALF, Quantised, quantise, rotation
from .fp8_queries import load_rotation, rotated_queries
from .fp8_weights import GROWTH, OFFSET, allocate_ones, approximate, as_operand, release, weights
from .schedule import Sizes, key_tiles, sees_key
from .softmax import ROWS, rescale, row_max
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


@gluon.jit
def step(
    o, b_p32, m, l, scales, b_q, scale_q, p_kv, i_step, i_m, i_tile, is_cut, pos, ones, buffers, barriers,
    c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """o += p v of the tile before, during the scores and the softmax of a key tile: (o, p, m, l, next scales) after it.

    The keys of this step have arrived when it starts, and those of the next when it ends. scales: of k and log2 of that
    of v in this tile, and the latter in the tile before.
    """
    BN: gl.constexpr = BLOCKS.k
    STAGES: gl.constexpr = BLOCKS.stages
    S_LAYOUT: gl.constexpr = m.type.layout.parent
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 4)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    i_s = i_step % STAGES

    zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    b_k = buffers.k.index(i_s).permute((1, 0))
    s_flight = warpgroup_mma(b_q, b_k, zeros, use_acc=False, is_async=True)
    b_p = as_operand(b_p32, BN, P_LAYOUT)
    o_flight = warpgroup_mma(b_p, buffers.v.index(i_s).permute((1, 0)), o, is_async=True)
    l_flight = warpgroup_mma(b_p, ones, gl.zeros_like(l), use_acc=False, is_async=True)
    scale_k, log2_v, log2_v_before = scales
    next_k, next_v = load_scales(p_kv, gl.maximum(i_tile - 1, 0))
    scale = scale_q * scale_k
    b_s = warpgroup_mma_wait(2, deps=(s_flight,))
    if is_cut:
        b_s = masked(b_s, i_m, i_tile * BN, pos, MODE, BN)

    # (ROWS,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    m_new = gl.convert_layout(row_max(b_s, BN, BLOCKS), m.type.layout) * scale + log2_v
    m_new = gl.where(m_new - m > GROWTH, m_new, m)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.where(m_new == m, 1.0, gl.exp2(m - m_safe))

    b_p32 = weights(b_s, scale, log2_v + OFFSET - m_safe)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    mbarrier.wait(barriers.kv_full.index((i_step + 1) % STAGES), ((i_step + 1) // STAGES) & 1)
    o, l_tile = warpgroup_mma_wait(0, deps=(o_flight, l_flight))
    release(b_p)
    mbarrier.arrive(barriers.kv_empty.index(i_s))
    l = (l + l_tile * gl.exp2(-log2_v_before)) * gl.convert_layout(alpha, L_ROWS)[:, None]
    o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    return o, b_p32, m_new, l, (next_k, next_v, log2_v)


@gluon.jit
def consumer(
    out, p_lse, p_lse2, p_kv, inputs, scalars, constants, buffers, barriers, sizes,
    c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Four warps: out and lse of 64 queries of each tile that the producer hands out."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    L_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 4)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    T = sizes.T

    i_step = 0
    i_round = 0
    mbarrier.wait(constants.rotation_full, 0)
    i_q, phase = q_stage(i_round, c, BLOCKS)
    i_m_all, i_b, i_h, i_kv = next_queries(i_q, phase, buffers, barriers)
    while i_h >= 0:
        i_bh = i_b * sizes.H + i_h
        i_m = i_m_all + c * ROWS
        pos = locate(T, sizes.S, inputs, scalars, i_b, i_bh, 1)
        _, _, _, n_end_all = key_tiles(i_m_all, pos, CONSUMERS * ROWS, BN, MODE)
        _, _, n_full, n_end = key_tiles(i_m, pos, ROWS, BN, MODE)
        p_kv_head = p_kv + i_kv * gl.cdiv(sizes.S, BN) * 2
        scale_k, log2_v = load_scales(p_kv_head, n_end - 1)
        mbarrier.wait(barriers.q_full.index(i_q), phase)
        b_q, scale_q = rotated_queries(buffers.q.index(i_q), constants.rotation, Q_LAYOUT, BD)
        mbarrier.arrive(barriers.q_empty.index(i_q))
        scale_q = gl.convert_layout(scale_q, S_ROWS) * scalars.scale_log2
        i_step, _ = skip(i_step, 0, n_end_all - n_end, barriers, c, BLOCKS)

        # The last tile that these queries see, which the diagonal or the end of the sequence cuts.
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)
        zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
        b_k = buffers.k.index(i_step % STAGES).permute((1, 0))
        s_flight = warpgroup_mma(b_q, b_k, zeros, use_acc=False, is_async=True)
        scale = scale_q * scale_k
        next_k, next_v = load_scales(p_kv_head, gl.maximum(n_end - 2, 0))
        scales = (next_k, next_v, log2_v)
        b_s = warpgroup_mma_wait(0, deps=(s_flight,))
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        b_s = masked(b_s, i_m, (n_end - 1) * BN, pos, MODE, BN)
        m = gl.convert_layout(row_max(b_s, BN, BLOCKS), S_ROWS) * scale + log2_v
        m_safe = gl.where(m == -float("inf"), 0.0, m)
        b_p32 = weights(b_s, scale, log2_v + OFFSET - m_safe)
        l = gl.zeros([ROWS, 8], gl.float32, L_LAYOUT)
        o = gl.zeros([ROWS, BD], gl.float32, O_LAYOUT)
        i_step += 1
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)

        for j in range(1, n_end):
            i_tile_n = n_end - 1 - j
            o, b_p32, m, l, scales = step(
                o, b_p32, m, l, scales, b_q, scale_q, p_kv_head, i_step, i_m, i_tile_n, i_tile_n >= n_full, pos,
                constants.ones, buffers, barriers, c, BLOCKS, MODE,
            )  # fmt: skip
            i_step += 1

        b_p = as_operand(b_p32, BN, P_LAYOUT)
        o_flight = warpgroup_mma(b_p, buffers.v.index(i_step % STAGES).permute((1, 0)), o, is_async=True)
        l_flight = warpgroup_mma(b_p, constants.ones, gl.zeros_like(l), use_acc=False, is_async=True)
        i_round += 1  # while the last products run
        i_q, phase = q_stage(i_round, c, BLOCKS)
        next_m_all, next_b, next_h, next_kv = next_queries(i_q, phase, buffers, barriers)
        o, l_tile = warpgroup_mma_wait(0, deps=(o_flight, l_flight))
        release(b_p)
        release(b_q)
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        l_row = gl.convert_layout(gl.max(l + l_tile * gl.exp2(-scales[2]), 1), S_ROWS)  # all columns are the same
        lse2 = m - OFFSET + approximate("lg2", l_row)
        i_step += 1

        inverse = gl.convert_layout(approximate("rcp", l_row), O_ROWS)
        if MODE.causal:  # rows that see nothing are zero; l = 0 tells less, as scores of -inf give it too
            inverse = gl.where(i_m + gl.arange(0, ROWS, O_ROWS) >= T - sizes.S, inverse, 0.0)
        o = o * inverse[:, None]
        b_out = buffers.out.index(c)
        tma.store_wait(0)
        b_out.store(o.to(out.dtype))
        fence_async_shared()
        b_out = b_out._reinterpret(out.dtype, [1, 1, ROWS, BD], out.layout)
        tma.async_copy_shared_to_global(out, [i_b, i_h, i_m, 0], b_out)
        # As the plain forward: lse2 is +inf for a row that saw nothing.
        o_m = i_m + gl.arange(0, ROWS, S_ROWS)
        gl.store(p_lse + i_bh.to(gl.int64) * T + o_m, lse2 / LOG2_E, mask=o_m < T)
        lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)
        T_padded = gl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
        gl.store(p_lse2 + i_bh.to(gl.int64) * T_padded + o_m, lse2, mask=o_m < T_padded)
        i_m_all, i_b, i_h, i_kv = next_m_all, next_b, next_h, next_kv
    tma.store_wait(0)


@gluon.jit
def fp8_forward_kernel(
    q, k, v, r, out, p_lse, p_lse2, p_kv, inputs, p_work, scalars, BLOCKS: gl.constexpr, MODE: gl.constexpr
):  # fmt: skip
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
                (out, p_lse, p_lse2, p_kv, inputs, scalars, constants, buffers, barriers, sizes, 0, BLOCKS, MODE),
            ),
            (
                consumer,
                (out, p_lse, p_lse2, p_kv, inputs, scalars, constants, buffers, barriers, sizes, 1, BLOCKS, MODE),
            ),
            (producer, (q, k, v, p_work, inputs, scalars, buffers, barriers, sizes, BLOCKS, MODE)),
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
    # Half of what fits the budget: 0.5% faster from 4,096 tokens on.
    n_together = max(1, head_group_size(B * H, x.k[0, 0], H // H_kv) // 2)
    n_programs = torch.cuda.get_device_properties(out.device).multi_processor_count
    # Rotating q and k has made their products as many times larger as they have columns.
    rotated = call._replace(spec=call.spec._replace(scale=call.spec.scale / blocks.columns))
    fp8_forward_kernel[(min(n_programs, n_m * B * H),)](
        tiles(q, ROWS.value, blocks.columns),
        fp8_tiles(x.k, blocks.k, blocks.columns),
        fp8_tiles(x.v, blocks.columns, blocks.k),
        tiles(rotation(blocks.columns, q.dtype, q.device), HALF.value, HALF.value),
        tiles(out, ROWS.value, blocks.columns),
        lse,
        lse2,
        x.scales,
        call.inputs,
        x.work,
        launch_scalars(rotated, n_together),
        BLOCKS=blocks,
        MODE=mode_of(call, out),
        num_warps=4,
        launch_pdl=True,  # see gdc_wait
    )
    return lse, lse2
