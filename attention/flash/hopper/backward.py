"""The backward kernel on Hopper: five products, where the plain backward's two passes make seven.

A program takes tiles of keys, one after the other, and walks over the query tiles that see them, the last first. It
keeps dk and dv. Its contributions to dq go to a workspace of fp32 values in device memory, where many key tiles add to
one query tile. They add **in the order of the key tiles**, so that gradients stay bitwise reproducible: a counter for
each query tile holds the index of the next key tile that may add. A key tile waits only for tiles before it. Another
counter hands out the key tiles in order, so a program waits only for tiles that are already being worked on. The order
of the tiles is that of DASH (arXiv:2601.21824).

    producer   one warp: hands out key tiles, brings k and v, and q, do, lse2 and delta of the next query tile
    writer     one warp: takes dk and dv away, which the consumer leaves in the place of k and v
    consumer   eight warps: s, p, dp, ds; dv += p^T do, dk += ds^T q, and dq = ds k into a slot of shared memory
    adders     two warps, a slot each: wait until they may add, and have the copy engine add dq to the workspace
    mask_drawer  four warps, at head size 64 with dropout: draw the mask of the next query tile

The last key tile that a query tile sees adds nothing: it gets the sum of the others in its slot, and writes dq.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ...gpu import multiprocessors
from ...scores.sinks import sinks_gradient_of_kernels
from .. import tiles as plain
from ..backward import Gradients, Targets
from ..call import KernelCall, Mode, Problem
from ..launch import launch
from ..score import LOG2_E, locate
from .added import far_number, hopper_inputs, hopper_mode
from .backward_pipeline import (
    PARTS,
    SLOTS,
    WIDTH,
    Counters,
    DeltaRows,
    allocate,
    bias_columns,
    launch_delta,
    mask_drawer,
    next_tile,
    place,
    producer,
    row_stride,
    writer,
)
from .backward_step import QueryTile, first_scores, keys_in_registers, load_added, no_sums, scores_layout, step
from .configs import BackwardBlocks, backward_blocks, key_tiles_together
from .program import (
    Program,
    Sizes,
    barrier,
    matrix,
    parts_tiles,
    reinterpret,
    row_tiles,
    run_roles,
    stage_of,
    tiles,
    tma_add,
    tma_load,
    tma_store,
    wait_full,
)
from .wide import backward as wide_backward


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


@gluon.jit
def load_slope(inputs, i_h, MODE: gl.constexpr):
    """ALiBi's slope of a head, times log2(e); 0 without ALiBi."""
    return gl.load(inputs.slopes + i_h) * LOG2_E if MODE.alibi else 0.0


@gluon.jit
def load_bias(inputs, i_b, i_h, i_n, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(BN,) in base 2: the values that a formula adds for the keys from i_n; 0 where there are none or s has them."""
    BN: gl.constexpr = BLOCKS.k
    bias = 0.0
    if MODE.biased and not BLOCKS.rows_in_products:
        LAYOUT: gl.constexpr = scores_layout(BLOCKS.part)
        o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
        bias = MODE.formula.column(inputs.formula, i_b, i_h, i_n, o_n, None)[0] * LOG2_E
    return bias


@gluon.jit
def place_bias(target, inputs, scale, i_b, i_h, i_n, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Put the values that a formula adds for the keys from i_n into the operand that adds lse2 to s.

    No product may be reading it. As the first addend of s it meets lse2, and cancels where it is large.
    """
    BN: gl.constexpr = BLOCKS.k
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [8, 1], [1, 0])
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    b_x = MODE.formula.column(inputs.formula, i_b, i_h, i_n, o_n, None)[0] / scale
    barrier()
    target.store(bias_columns(b_x, LAYOUT))
    fence_async_shared()
    barrier()


@gluon.jit
def store_sums(sums, b_sum, i_bh, i_n, S, KEEP: gl.constexpr, OF_DS: gl.constexpr):
    """Write the sums of the keys from i_n, of what `add_to_dk` gives."""
    b_sum = gl.max(b_sum, 1) if OF_DS else gl.sum(b_sum, 1)
    o_n = i_n + gl.arange(0, b_sum.shape[0], b_sum.type.layout)
    gl.store(sums + gl.cast(i_bh, gl.int64) * S + o_n, b_sum * KEEP, mask=o_n < S)


@gluon.jit
def head_of_ds(ds, i_bh, i_n, pos, BLOCKS: gl.constexpr):
    """Where ds of a head's first query and of key i_n is written; 0 if it is not needed."""
    p_ds = 0
    if BLOCKS.writes_ds:
        p_ds = ds + gl.cast(i_bh, gl.int64) * pos.T * row_stride(pos.S, BLOCKS) + i_n
    return p_ds


@gluon.jit
def consumer(targets, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Eight warps: dk and dv of a tile of keys, summed over the G query heads that share it, and all its dq tiles."""
    M: gl.constexpr = BLOCKS.part
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    KEY_STAGES: gl.constexpr = BLOCKS.key_stages
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BD, 16])
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes
    dtype: gl.constexpr = buffers.k.dtype

    i_step = 0
    i_round = 0
    tile = next_tile(i_round, buffers, barriers, 8)
    while tile.i_tile >= 0:
        i_bh = tile.i_b * sizes.H + tile.i_h
        pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, tile.i_b, i_bh, sizes.G)
        n_steps = (tile.end - tile.start) * sizes.G
        slope2 = load_slope(program.inputs, tile.i_h, MODE)
        i_n = tile.i_tile * BN
        bias = load_bias(program.inputs, tile.i_b, tile.i_h, i_n, BLOCKS, MODE)
        far = far_number(program.inputs, tile.i_b, tile.i_h, MODE)
        if MODE.biased and BLOCKS.rows_in_products:  # of the only query head: see `backward`
            ones = buffers.ones.index(0)
            place_bias(ones, program.inputs, program.scalars.scale, tile.i_b, tile.i_h, i_n, BLOCKS, MODE)
        stage = stage_of(i_round, KEY_STAGES)
        k_s, v_s = buffers.k.index(stage.index), buffers.v.index(stage.index)
        wait_full(barriers.kv_full, stage)
        b_dk = gl.zeros([BN, BD], gl.float32, LAYOUT)
        b_dv = gl.zeros([BN, BD], gl.float32, LAYOUT)
        b_k = k_s.load(gl.DotOperandLayout(0, scores_layout(M), 2)) if keys_in_registers(M, BD) else k_s
        numbers = load_added(tile.i_h, (tile.end - 1) * BLOCKS.q, tile, program, BLOCKS, MODE)
        s_flight = first_scores(b_k, i_step, n_steps > 0, numbers, program, BLOCKS, MODE)
        b_s = warpgroup_mma_wait(0, deps=(s_flight,))
        # Counted, because a division would delay each step's first product.
        i_h, i_tile_m = tile.i_h, tile.end - 1
        b_sum = no_sums(BLOCKS)
        for i in range(n_steps):
            ends_head = i_tile_m == tile.start
            next_h = gl.where(ends_head, i_h + 1, i_h)
            # Loaded one step ahead: a load takes longer than the time until a step's first exponential.
            known_h = gl.minimum(next_h, tile.i_h + sizes.G - 1)
            next_slope2 = load_slope(program.inputs, known_h, MODE)
            next_bias = load_bias(program.inputs, tile.i_b, known_h, i_n, BLOCKS, MODE)
            next_far = far_number(program.inputs, tile.i_b, known_h, MODE)
            next_m = gl.where(ends_head, tile.end - 1, i_tile_m - 1) if MODE.added == "pair" else 0
            p_ds = head_of_ds(targets.ds, tile.i_b * sizes.H + i_h, i_n, pos, BLOCKS)
            queries = QueryTile(
                i_h, i_tile_m, slope2, bias, far, p_ds, known_h, next_m, i_step + i, i + 1 < n_steps
            )  # fmt: skip
            b_s, b_dk, b_dv, b_sum = step(
                b_s, b_dk, b_dv, b_sum, b_k, stage.index, queries, tile, pos, program, BLOCKS, MODE
            )
            if BLOCKS.sums is not None:  # noqa: SIM102 - this one is decided by the compiler
                if ends_head:
                    i_bh = tile.i_b * sizes.H + i_h
                    store_sums(targets.sums, b_sum, i_bh, i_n, sizes.S, KEEP_SCALE, BLOCKS.sums == "ds")
                    b_sum = no_sums(BLOCKS)
            slope2 = next_slope2
            bias = next_bias
            far = next_far
            i_h = next_h
            i_tile_m = gl.where(ends_head, tile.end - 1, i_tile_m - 1)
        i_step += n_steps
        k_s.store((b_dk * (program.scalars.scale * KEEP_SCALE)).to(dtype))
        v_s.store((b_dv * KEEP_SCALE).to(dtype))
        fence_async_shared()
        mbarrier.arrive(barriers.dkdv_full.index(stage.index))
        i_round += 1
        tile = next_tile(i_round, buffers, barriers, 8)


@gluon.jit
def backward_kernel(
    q,
    k,
    v,
    do,
    dq,
    dk,
    dv,
    rows,
    delta,
    dq_sum,
    counters,
    targets,
    inputs,
    scalars,
    BLOCKS: gl.constexpr,
    MODE: gl.constexpr,
):
    """dq, dk and dv of all tiles of keys. Grid: at most a program for each multiprocessor.

    rows: the parts of lse2 and delta, where these come with the products; else lse2.
    targets: a Targets
    """
    buffers, barriers = allocate(q.dtype, dq_sum, BLOCKS)
    H, H_kv, T, S = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    sizes = Sizes(H, H // H_kv, T, S, gl.cdiv(S, BLOCKS.k), q.shape[0] * H_kv, scalars.n_together >> 2)
    program = Program(inputs, scalars, buffers, barriers, sizes)
    next_tiles, work = counters.next_tile, counters.work
    run_roles(
        (consumer, (targets, program, BLOCKS, MODE)),
        [
            (producer, (q, k, v, do, rows, delta, targets.ds, work, program, BLOCKS, MODE), 1, 24),
            (writer, (dk, dv, program, BLOCKS), 1, 24),
            (adder, (dq, dq_sum, next_tiles, program, 0, BLOCKS), 1, 24),
            (adder, (dq, dq_sum, next_tiles, program, 1, BLOCKS), 1, 24),
            (mask_drawer, (program, BLOCKS), 4 if BLOCKS.mask_drawer else 0, 40),
        ],
    )


class BackwardPlan(NamedTuple):
    """What the properties of a call determine: `n_together` key/value heads run at the same time, if there are more."""

    blocks: BackwardBlocks
    mode: Mode
    n_together: int


@lru_cache(maxsize=1024)
def plan_backward(problem: Problem, H: int, H_kv: int, n_programs: int, horizon: bool, writes_ds: bool) -> BackwardPlan:
    """The plan of a call with H query heads and H_kv key/value heads; `horizon` as Mode has it."""
    blocks = backward_blocks(problem)
    mode = hopper_mode(problem.spec, problem.head_dim, problem.dtype, horizon)
    if mode.biased and H_kv != H:  # heads differ in their biases, and the keys' operand belongs to one head
        blocks = blocks._replace(rows_in_products=False)
    if writes_ds:
        blocks = blocks._replace(writes_ds=True, ds_aligned=problem.keys % 4 == 0)
    return BackwardPlan(blocks, mode, max(1, n_programs // key_tiles_together(problem, H // H_kv)))


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    gradients: Gradients,
    call: KernelCall,
) -> Tensor | None:
    """do and out like q (B, H, T, D), lse2 of the forward; fills the gradients.

    Returns the gradient of the sinks (H,), or None where there are none.
    """
    (dq, dk, dv, sums, ds, delta), sinks, slopes = gradients, call.inputs.sinks, call.inputs.slopes
    problem = call.problem(q, k)
    if problem.head_dim > 128:
        return wide_backward(do, q, k, v, out, lse2, gradients, call)
    B, H, T, _ = q.shape
    _, H_kv, S, _ = k.shape
    n_programs = multiprocessors(q.device)
    blocks, mode, n_together = plan_backward(
        problem, H, H_kv, n_programs, call.inputs.horizons is not None, ds is not None
    )
    n_m, n_n = (T + blocks.q - 1) // blocks.q, (S + blocks.k - 1) // blocks.k
    if T > S or call.spec.offsets:  # a query tile may then see no key tile that would write its dq
        dq.zero_()
    do = plain.addressable(do)
    # A formula gives rows beyond the end any scores: their lse2 must be infinite, which `delta_kernel` sees to.
    in_products, biased = blocks.rows_in_products, slopes is not None or call.inputs.formula is not None
    n_rows = n_m * blocks.q
    if delta is None and (sinks is not None or not in_products):
        delta = plain.rows_like(q)
    rows = DeltaRows(
        lse2=q.new_empty(B, H, n_rows, dtype=torch.float32) if biased and not in_products else None,
        delta=delta,
        parts=q.new_empty(B * H * n_rows, 16 if mode.biased else 8, dtype=torch.bfloat16) if in_products else None,
    )
    counters = Counters(q.new_empty(B * H * n_m, dtype=torch.int32), q.new_empty(1, dtype=torch.int32), None)
    dq_sum = q.new_empty(B * H * n_m * blocks.q * blocks.columns // WIDTH.value, WIDTH.value, dtype=torch.float32)
    launch_delta(out, do, lse2, rows, counters, call, blocks, mode.biased)
    if in_products:
        row_values = parts_tiles(rows.parts, blocks.q, PARTS.value)
    else:
        row_values = row_tiles(rows.lse2, n_rows, blocks.q) if biased else row_tiles(lse2, T, blocks.q)
    launch(
        backward_kernel,
        (min(n_programs, n_n * B * H_kv), 1, 1),
        tiles(q, blocks.q, blocks.columns),
        tiles(k, blocks.k, blocks.columns),
        tiles(v, blocks.k, blocks.columns),
        tiles(do, blocks.q, blocks.columns),
        tiles(dq, blocks.q, blocks.columns),
        tiles(dk, blocks.k, blocks.columns),
        tiles(dv, blocks.k, blocks.columns),
        row_values,
        None if in_products else row_tiles(rows.delta, T, blocks.q),
        matrix(dq_sum, blocks.q * blocks.columns // WIDTH.value),
        counters,
        Targets(sums, ds),
        hopper_inputs(call, T, S),
        plain.launch_scalars(call, min(B * H_kv, n_together)),
        BLOCKS=blocks,
        MODE=mode,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return None if sinks is None else sinks_gradient_of_kernels(sinks, lse2, rows.delta, T, call.spec.threshold)
