"""The forward kernel on Hopper: the plain forward's algorithm, with its products beside its softmax.

The warps of a program have roles. A producer, one warp, has the copy engine bring tiles of q, k and v; each consumer, a
warpgroup, has 64 queries of its own and walks over the key tiles that they see, the last first:

    producer      k_5      k_4, v_5                       k_3, v_4                       k_2, v_3
    tensor core   q k_5^T  q k_4^T,  o += p_5 v_5         q k_3^T,  o += p_4 v_4         ...
    consumer               p_5       p_4 = softmax(...)             p_3 = softmax(...)

A step of the pipeline is the pair (k of a tile, v of the tile before it): while a consumer takes the softmax of its
scores, its product with v is in flight, and so are the products of the other consumers. Programs stay on their
multiprocessor and take the next tile of queries from a counter, the longest rows first.
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

from ..configs import Options
from ..tiles import ROW_ALIGNMENT, head_group_size, rows_like
from .configs import ForwardBlocks
from .dropout import drop, load_key
from .schedule import Sizes, key_tiles, locate
from .tiles import tiles

LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # of a consumer: what a warpgroup multiplies at once
# While a row's maximum grows by less, in powers of two, the old one serves: it only guards against overflow.
GROWTH = gl.constexpr(8)


class Buffers(NamedTuple):
    """Shared memory: a tile of q and of out for each consumer, stages of k and v, the number of the tile of queries."""

    q: Any
    k: Any
    v: Any
    out: Any
    work: Any


class Barriers(NamedTuple):
    """work, q: for each consumer; kv: for each stage. turn: whose products are next, where consumers take turns."""

    work_full: Any
    q_full: Any
    q_empty: Any
    kv_full: Any
    kv_empty: Any
    turn: Any


@gluon.jit
def producer(q, k, v, p_work, buffers, barriers, sizes, CAUSAL: gl.constexpr, BLOCKS: gl.constexpr):
    """One warp: hands out tiles of queries, and brings them and the keys and values that they see."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    dtype: gl.constexpr = q.dtype

    i_step = 0
    i_round = 0
    i_work = gl.program_id(0)
    n_work = sizes.n_tiles * sizes.n_heads
    while i_work < n_work:
        i_tile, i_bh = locate(i_work, sizes)
        i_m = (sizes.n_tiles - 1 - i_tile) * CONSUMERS * ROWS
        i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
        i_kv = i_h // sizes.G
        _, n_end = key_tiles(i_m, sizes, CAUSAL, CONSUMERS * ROWS, BN)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(barriers.q_empty.index(c), (i_round & 1) ^ 1)
            buffers.work.index(c).store(gl.full([1], i_work, gl.int32, SCALAR))
            mbarrier.arrive(barriers.work_full.index(c))
            q_full = barriers.q_full.index(c)
            mbarrier.expect(q_full, q.block_type.nbytes)
            b_q = buffers.q.index(c)._reinterpret(dtype, [1, 1, ROWS, BD], q.layout)
            tma.async_copy_global_to_shared(q, [i_b, i_h, i_m + c * ROWS, 0], q_full, b_q)
        for j in range(n_end + 1):
            i_n = (n_end - 1 - j) * BN
            has_k, has_v = j < n_end, j > 0
            i_s = i_step % STAGES
            kv_full = barriers.kv_full.index(i_s)
            mbarrier.wait(barriers.kv_empty.index(i_s), ((i_step // STAGES) & 1) ^ 1)
            mbarrier.expect(kv_full, 2 * k.block_type.nbytes, pred=has_k & has_v)
            mbarrier.expect(kv_full, k.block_type.nbytes, pred=has_k != has_v)
            b_k = buffers.k.index(i_s)._reinterpret(dtype, [1, 1, BN, BD], k.layout)
            b_v = buffers.v.index(i_s)._reinterpret(dtype, [1, 1, BN, BD], v.layout)
            tma.async_copy_global_to_shared(k, [i_b, i_kv, i_n, 0], kv_full, b_k, pred=has_k)
            tma.async_copy_global_to_shared(v, [i_b, i_kv, i_n + BN, 0], kv_full, b_v, pred=has_v)
            i_step += 1
        i_round += 1
        i_work = gl.num_programs(0) + gl.atomic_add(p_work, 1)
    for c in gl.static_range(CONSUMERS):  # work that does not exist ends the consumers
        mbarrier.wait(barriers.q_empty.index(c), (i_round & 1) ^ 1)
        buffers.work.index(c).store(gl.full([1], i_work, gl.int32, SCALAR))
        mbarrier.arrive(barriers.work_full.index(c))


@gluon.jit
def next_work(work_s, work_full, i_round):
    """The number of the tile of queries that the producer hands out."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(work_full, i_round & 1)
    return gl.max(work_s.load(SCALAR), 0)


@gluon.jit
def row_max(b_s, N: gl.constexpr, BLOCKS: gl.constexpr):
    """The maximum of each row. Two consumers have the registers to follow several chains of maxima at once."""
    if BLOCKS.consumers == 2:
        b_s = gl.max(gl.max(b_s.reshape([ROWS, N // 32, 4, 8]), 1), 1)
    return gl.max(b_s, 1)


@gluon.jit
def row_sum(b_p, N: gl.constexpr):
    """(ROWS, 4): what each of a row's four threads holds of it, summed. The four are added once, at the end."""
    return gl.sum(gl.sum(b_p.reshape([ROWS, N // 8, 4, 2]), 1), 2)


@gluon.constexpr_function
def rescale_asm(n):
    """PTX for n registers of a thread and their factors, which are those of two rows, alternating in pairs."""
    moves = " ".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"""{{
        .reg .pred p, q;
        {moves}
        setp.ne.f32 p, ${2 * n}, 0f3F800000;
        setp.ne.or.f32 q, ${2 * n + 2}, 0f3F800000, p;
        vote.sync.any.pred p, q, 0xffffffff;
        @!p bra DONE;
        {products}
        DONE:
        }}"""


@gluon.constexpr_function
def rescale_constraints(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def rescale(o, alpha, BD: gl.constexpr):
    """o times each row's factor; a warp whose factors are all 1, as they most often are, skips the products."""
    N: gl.constexpr = BD // 2  # registers of o in a thread
    ASM: gl.constexpr = rescale_asm(N)
    CONSTRAINTS: gl.constexpr = rescale_constraints(N)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [o, alpha[:, None]], dtype=gl.float32, is_pure=True, pack=N)


@gluon.jit
def masked(b_s, i_m, i_n, sizes, CAUSAL: gl.constexpr, N: gl.constexpr):
    """Scores (ROWS, N) with -inf where a query does not see a key."""
    layout: gl.constexpr = b_s.type.layout
    o_m = i_m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_n = i_n + gl.arange(0, N, gl.SliceLayout(0, layout))
    m_s = o_n[None, :] <= o_m[:, None] + (sizes.S - sizes.T) if CAUSAL else (o_n < sizes.S)[None, :]
    return gl.where(m_s, b_s, -float("inf"))


@gluon.jit
def step(
    o, b_p, m, l, key, i_step, i_turn, i_m, i_n, is_cut, scale_log2, buffers, barriers, sizes,
    c: gl.constexpr, CAUSAL: gl.constexpr, THRESHOLD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """o += p v of the tile before, beside the scores and the softmax of the key tile at i_n: (o, p, m, l) after it.

    The keys of this step have arrived when it starts, and those of the next when it ends.
    """
    BN: gl.constexpr = BLOCKS.k
    STAGES: gl.constexpr = BLOCKS.stages
    S_LAYOUT: gl.constexpr = m.type.layout.parent
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    i_s = i_step % STAGES

    if BLOCKS.in_turn:
        mbarrier.wait(barriers.turn.index(c), i_turn & 1)
    zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    b_k = buffers.k.index(i_s).permute((1, 0))
    s_flight = warpgroup_mma(buffers.q.index(c), b_k, zeros, use_acc=False, is_async=True)
    o_flight = warpgroup_mma(b_p, buffers.v.index(i_s), o, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(s_flight,))
    if BLOCKS.in_turn:
        mbarrier.arrive(barriers.turn.index((c + 1) % BLOCKS.consumers))
    if is_cut:
        b_s = masked(b_s, i_m, i_n, sizes, CAUSAL, BN)

    # (ROWS,) A row that has seen nothing yet has maximum -inf, and exp2(-inf - -inf) would be NaN.
    m_new = gl.convert_layout(row_max(b_s, BN, BLOCKS), m.type.layout) * scale_log2
    m_new = gl.where(m_new - m > GROWTH, m_new, m)
    m_safe = gl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = gl.where(m_new == m, 1.0, gl.exp2(m - m_safe))

    # (ROWS, BN) l is summed before anything is dropped.
    b_p32 = gl.exp2(b_s * scale_log2 - m_safe[:, None])
    l = l * gl.convert_layout(alpha, L_ROWS)[:, None] + row_sum(b_p32, BN)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    mbarrier.wait(barriers.kv_full.index((i_step + 1) % STAGES), ((i_step + 1) // STAGES) & 1)
    o, b_p = warpgroup_mma_wait(0, deps=(o_flight, b_p))
    mbarrier.arrive(barriers.kv_empty.index(i_s))
    o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    b_p = gl.convert_layout(b_p32.to(buffers.q.dtype), b_p.type.layout)
    if THRESHOLD:
        b_p = drop(b_p, key, i_m, i_n, THRESHOLD, ROWS, BN)
    return o, b_p, m_new, l


@gluon.jit
def consumer(
    out, rows, p_key, scale_log2, buffers, barriers, sizes,
    c: gl.constexpr, CAUSAL: gl.constexpr, THRESHOLD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Four warps: out and lse of 64 queries of each tile that the producer hands out."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    KEEP_SCALE: gl.constexpr = 256 / (256 - THRESHOLD)
    dtype: gl.constexpr = out.dtype
    p_lse, p_lse2 = rows
    T = sizes.T

    i_step = 0
    i_turn = 0
    i_round = 0
    i_work = next_work(buffers.work.index(c), barriers.work_full.index(c), i_round)
    while i_work < sizes.n_tiles * sizes.n_heads:
        i_tile, i_bh = locate(i_work, sizes)
        i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
        i_m0 = (sizes.n_tiles - 1 - i_tile) * CONSUMERS * ROWS
        i_m = i_m0 + c * ROWS
        _, n_end_all = key_tiles(i_m0, sizes, CAUSAL, CONSUMERS * ROWS, BN)
        n_full, n_end = key_tiles(i_m, sizes, CAUSAL, ROWS, BN)
        for _ in range(n_end_all - n_end):  # tiles that only the other consumers see
            mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)
            mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
            i_step += 1
            if BLOCKS.in_turn:
                mbarrier.wait(barriers.turn.index(c), i_turn & 1)
                mbarrier.arrive(barriers.turn.index((c + 1) % CONSUMERS))
                i_turn += 1
        key = load_key(p_key, i_b, i_h) if THRESHOLD else None

        # The last tile that these queries see, which the diagonal or the end of the sequence cuts.
        i_n = (n_end - 1) * BN
        mbarrier.wait(barriers.q_full.index(c), i_round & 1)
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)
        zeros = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
        b_k = buffers.k.index(i_step % STAGES).permute((1, 0))
        s_flight = warpgroup_mma(buffers.q.index(c), b_k, zeros, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(s_flight,))
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        b_s = masked(b_s, i_m, i_n, sizes, CAUSAL, BN)
        m = gl.convert_layout(row_max(b_s, BN, BLOCKS), S_ROWS) * scale_log2
        m_safe = gl.where(m == -float("inf"), 0.0, m)
        b_p32 = gl.exp2(b_s * scale_log2 - m_safe[:, None])
        l = row_sum(b_p32, BN)
        b_p = gl.convert_layout(b_p32.to(dtype), P_LAYOUT)
        if THRESHOLD:
            b_p = drop(b_p, key, i_m, i_n, THRESHOLD, ROWS, BN)
        o = gl.zeros([ROWS, BD], gl.float32, O_LAYOUT)
        i_step += 1
        mbarrier.wait(barriers.kv_full.index(i_step % STAGES), (i_step // STAGES) & 1)

        for j in range(1, n_end):
            i_tile_n = n_end - 1 - j
            o, b_p, m, l = step(
                o, b_p, m, l, key, i_step, i_turn, i_m, i_tile_n * BN, i_tile_n >= n_full, scale_log2,
                buffers, barriers, sizes, c, CAUSAL, THRESHOLD, BLOCKS,
            )  # fmt: skip
            i_step += 1
            i_turn += 1

        o_flight = warpgroup_mma(b_p, buffers.v.index(i_step % STAGES), o, is_async=True)
        mbarrier.arrive(barriers.q_empty.index(c))
        l_row = gl.convert_layout(gl.sum(l, 1), S_ROWS)
        lse2 = m + gl.log2(l_row)
        o, b_p = warpgroup_mma_wait(0, deps=(o_flight, b_p))
        mbarrier.arrive(barriers.kv_empty.index(i_step % STAGES))
        i_step += 1
        i_round += 1

        # Kept weights are rescaled once, here, by the inverse of the keep probability.
        o = o * gl.convert_layout(KEEP_SCALE / l_row, O_ROWS)[:, None]
        if CAUSAL:  # rows that see nothing are zero; l = 0 tells less, as scores of -inf give it too
            o = gl.where((i_m + gl.arange(0, ROWS, O_ROWS) >= T - sizes.S)[:, None], o, 0.0)
        b_out = buffers.out.index(c)
        tma.store_wait(0)
        b_out.store(o.to(dtype))
        fence_async_shared()
        b_out = b_out._reinterpret(dtype, [1, 1, ROWS, BD], out.layout)
        tma.async_copy_shared_to_global(out, [i_b, i_h, i_m, 0], b_out)
        # As the plain forward: lse2 for the backward, +inf for a row that saw nothing.
        o_m = i_m + gl.arange(0, ROWS, S_ROWS)
        gl.store(p_lse + i_bh.to(gl.int64) * T + o_m, lse2 / LOG2_E, mask=o_m < T)
        lse2 = gl.where(lse2 == -float("inf"), float("inf"), lse2)
        T_padded = gl.cdiv(T, ROW_ALIGNMENT) * ROW_ALIGNMENT
        gl.store(p_lse2 + i_bh.to(gl.int64) * T_padded + o_m, lse2, mask=o_m < T_padded)
        i_work = next_work(buffers.work.index(c), barriers.work_full.index(c), i_round)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "G", "T", "S", "n_m", "n_heads", "n_together"])
def forward_kernel(
    q, k, v, out, p_lse, p_lse2, p_key, p_work, scale_log2, H, G, T, S, n_m, n_heads, n_together,
    CAUSAL: gl.constexpr, THRESHOLD: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """out and lse of n_m tiles of queries x n_heads. Grid: at most a program for each multiprocessor."""
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    BD: gl.constexpr = BLOCKS.columns
    STAGES: gl.constexpr = BLOCKS.stages
    REGISTERS: gl.constexpr = BLOCKS.registers
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    dtype: gl.constexpr = q.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    buffers = Buffers(
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BN, BD], k_layout),
        gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BD], q_layout),
        gl.allocate_shared_memory(gl.int32, [CONSUMERS, 1], BARRIER),
    )
    barriers = Barriers(
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER),
    )
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(barriers.work_full.index(i), count=1)
        mbarrier.init(barriers.q_full.index(i), count=1)
        mbarrier.init(barriers.q_empty.index(i), count=1)
        mbarrier.init(barriers.turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.kv_full.index(i), count=1)
        mbarrier.init(barriers.kv_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if BLOCKS.in_turn:
        mbarrier.arrive(barriers.turn.index(0))

    sizes = Sizes(H, G, T, S, n_m, n_heads, n_together)
    rows = (p_lse, p_lse2)
    # Gluon takes the roles as a literal; the first has the warps of the launch and the registers that are left.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (out, rows, p_key, scale_log2, buffers, barriers, sizes, 0, CAUSAL, THRESHOLD, BLOCKS)),
                (consumer, (out, rows, p_key, scale_log2, buffers, barriers, sizes, 1, CAUSAL, THRESHOLD, BLOCKS)),
                (producer, (q, k, v, p_work, buffers, barriers, sizes, CAUSAL, BLOCKS)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (out, rows, p_key, scale_log2, buffers, barriers, sizes, 0, CAUSAL, THRESHOLD, BLOCKS)),
                (consumer, (out, rows, p_key, scale_log2, buffers, barriers, sizes, 1, CAUSAL, THRESHOLD, BLOCKS)),
                (consumer, (out, rows, p_key, scale_log2, buffers, barriers, sizes, 2, CAUSAL, THRESHOLD, BLOCKS)),
                (producer, (q, k, v, p_work, buffers, barriers, sizes, CAUSAL, BLOCKS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, key: Tensor | None, options: Options, blocks: ForwardBlocks
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D), key (7,) int64 or None -> lse and lse2; fills out, like q.

    All as in the plain forward.
    """
    B, H, T, _ = q.shape
    H_kv, S = k.shape[1:3]
    lse, lse2 = q.new_empty(B, H, T, dtype=torch.float32), rows_like(q)
    if out.numel() == 0 or S == 0:
        out.zero_()
        return lse.fill_(-torch.inf), lse2.fill_(torch.inf)
    n_m = triton.cdiv(T, blocks.consumers * ROWS.value)
    n_programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    forward_kernel[(min(n_programs, n_m * B * H),)](
        tiles(q, ROWS.value, blocks.columns),
        tiles(k, blocks.k, blocks.columns),
        tiles(v, blocks.k, blocks.columns),
        tiles(out, ROWS.value, blocks.columns),
        lse,
        lse2,
        key,
        torch.zeros(1, dtype=torch.int32, device=q.device),
        options.scale * LOG2_E.value,
        H,
        H // H_kv,
        T,
        S,
        n_m,
        B * H,
        head_group_size(B * H, k[0, 0], H // H_kv),
        CAUSAL=options.causal,
        THRESHOLD=options.threshold,
        BLOCKS=blocks,
        num_warps=4,
    )
    return lse, lse2
