"""The forward kernel on Hopper: the plain forward's algorithm, with products and softmax at the same time.

The warps of a program have roles. A producer, one warp, has the copy engine bring tiles of q, k and v; each consumer, a
warpgroup, has 64 queries and walks over the key tiles that they see, the last first:

    producer      k_5      k_4, v_5                       k_3, v_4                       k_2, v_3
    tensor core   q k_5^T  q k_4^T,  o += p_5 v_5         q k_3^T,  o += p_4 v_4         ...
    consumer               p_5       p_4 = softmax(...)             p_3 = softmax(...)

A step of the pipeline is the pair (k of a tile, v of the tile before it): while a consumer takes the softmax of its
scores, its product with v is in flight, and so are the products of the other consumers. Programs stay on their
multiprocessor and take the next tile of queries from a counter, the longest rows first.

An optimistic step does not look for its rows' maxima. It takes the weights with the maxima of the tiles before, and
adds them up. Only where a sum is too large are the scores computed again, for their maximum. That is rare, and
otherwise saves almost a fifth of a step's instructions.

For short sequences at head size 64 a program is one consumer alone, for one tile of queries or two: one of its threads
gives the copy engine its next tiles. Three or four programs share a multiprocessor, and the products of one run during
the softmax, the beginning and the end of the others.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
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

from ...gpu import multiprocessors
from ...scores.soft_cap import LEAST_MAXIMUM
from ..call import KernelCall, Mode, Problem
from ..formula import is_biased
from ..forward import factor_input, load_factors, scaled_queries, without_keys
from ..launch import launch
from ..score import LOG2_E, key_interval, locate
from ..tiles import Rows, head_group_size, launch_scalars, rows_like, store_lse, swizzle
from .added import hopper_inputs, hopper_mode, key_numbers
from .configs import ForwardBlocks, forward_blocks
from .forward_pipeline import (
    Keys,
    Work,
    allocate,
    fetch_alone,
    fetch_queries,
    first_part,
    next_work,
    producer,
    release_stage,
    skip,
)
from .masks import as_bits
from .program import Program, Sizes, Stage, barrier, key_tiles, run_roles, stage_of, take_tile, tiles, wait_full
from .softmax import (
    GROWTH,
    ROWS,
    are_small,
    as_operand,
    exponent_factor,
    finish_scores,
    load_added,
    load_queries,
    n_pieces,
    new_maximum,
    rescale,
    round_weights,
    row_bias,
    row_max,
    row_sum,
    start_scores,
    tile_max,
    tile_shift,
    tile_sum,
    weights,
)

# Heads that run at the same time where horizons differ from head to head: the longest rows of all of them come first.
# Timed with 8 heads of 16,384 tokens.
HEADS_WITH_HORIZONS = 4


@gluon.jit
def consumer(out, rows, program, c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Four warps: out and lse of 64 queries of each tile that the producer hands out."""
    i_step = 0
    i_order = 0
    i_round = 0
    work = next_work(i_round, program.buffers, program.barriers, c, BLOCKS)
    while work.i_h >= 0:
        i_step, i_order = attend(out, rows, None, work, program, i_step, i_order, c, BLOCKS, MODE)
        i_round += 1
        work = next_work(i_round, program.buffers, program.barriers, c, BLOCKS)
    tma.store_wait(0)


@gluon.jit
def consumer_alone(q, k, v, parts, out, rows, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Four warps without a producer: out and lse of 64 queries, or of two such tiles, all of a program's work.

    Two are the n-th from the end of a row and then the n-th, so that all programs have as much to do. What the second
    needs first is brought during the last steps of the first.
    """
    STAGES: gl.constexpr = BLOCKS.stages
    TILES: gl.constexpr = BLOCKS.q_stages
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes
    i_tile, i_bh = swizzle(gl.program_id(0), gl.cdiv(sizes.n_tiles, TILES), sizes.n_heads, sizes.n_together)
    i_m = (sizes.n_tiles - 1 - i_tile) * ROWS
    i_b, i_h = i_bh // sizes.H, i_bh % sizes.H
    pos = locate(sizes.T, sizes.S, program.inputs, program.scalars, i_b, i_bh, 1)
    n_start, _, _, n_end = key_tiles(i_m, pos, ROWS, BLOCKS.k, MODE)
    next_start, next_end = 0, 0
    if TILES > 1:
        is_pair = i_tile * ROWS < i_m
        next_start, _, _, next_end = key_tiles(i_tile * ROWS, pos, ROWS, BLOCKS.k, MODE)
        next_end = gl.where(is_pair, next_end, next_start)
    i_row = first_part(i_bh, sizes, MODE)
    keys = Keys(k, v, parts, i_b, i_h // sizes.G, i_row, n_start, n_end, next_start, next_end)
    fetch_queries(q, i_b, i_h, i_m, 0, buffers, barriers)
    for j in gl.static_range(STAGES):
        fetch_alone(j, j, keys, buffers, barriers, BLOCKS, MODE)
    i_step = 0
    i_order = 0
    if TILES > 1:
        if is_pair:
            fetch_queries(q, i_b, i_h, i_tile * ROWS, 1, buffers, barriers)
        for i in range(gl.where(is_pair, 2, 1)):
            work = Work(gl.where(i == 0, i_m, i_tile * ROWS), i_b, i_h, Stage(i, 0))
            i_step, i_order = attend(out, rows, keys, work, program, i_step, i_order, 0, BLOCKS, MODE)
            i_step += 1
    else:
        attend(out, rows, keys, Work(i_m, i_b, i_h, Stage(0, 0)), program, i_step, i_order, 0, BLOCKS, MODE)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(q, k, v, parts, out, rows, inputs, p_work, scalars, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """out and lse of all tiles of queries.

    parts: see added.py; None where a formula adds no number of each key

    Grid: a program for each tile where it is a consumer alone, else at most one for each multiprocessor.
    """
    buffers, barriers = allocate(q.dtype, BLOCKS, MODE)
    H, T = q.shape[1], q.shape[2]
    n_tiles = gl.cdiv(T, BLOCKS.consumers * ROWS)
    sizes = Sizes(H, H // k.shape[1], T, k.shape[2], n_tiles, q.shape[0] * H, scalars.n_together >> 2)
    program = Program(inputs, scalars, buffers, barriers, sizes)
    if BLOCKS.consumers == 1:
        consumer_alone(q, k, v, parts, out, rows, program, BLOCKS, MODE)
    else:
        run_roles(
            (consumer, (out, rows, program, 0, BLOCKS, MODE)),
            [
                (consumer, (out, rows, program, 1, BLOCKS, MODE), 4, BLOCKS.registers),
                (consumer, (out, rows, program, 2, BLOCKS, MODE), 4 if BLOCKS.consumers == 3 else 0, BLOCKS.registers),
                (producer, (q, k, v, parts, p_work, program, BLOCKS, MODE), 1, 24),
            ],
        )


class ForwardPlan(NamedTuple):
    """What the properties of a call determine: see `launch` for the first three."""

    blocks: ForwardBlocks
    mode: Mode
    grid: tuple[int, int, int]
    n_together: int


@lru_cache(maxsize=1024)
def plan_forward(
    problem: Problem, B: int, H: int, H_kv: int, n_programs: int, horizon: bool, blocks: ForwardBlocks | None
) -> ForwardPlan:
    """The plan of a call with B sequences, H query heads and H_kv key/value heads; `horizon` as Mode has it."""
    blocks = blocks or forward_blocks(problem)
    rows = blocks.consumers * ROWS.value
    n_m = (problem.queries + rows - 1) // rows
    n_together = head_group_size(B * H, problem.keys * problem.head_dim * problem.dtype.itemsize, H // H_kv)
    if horizon:
        n_together = max(n_together, min(B * H, HEADS_WITH_HORIZONS))
    if blocks.consumers == 1:
        n_m = (n_m + blocks.q_stages - 1) // blocks.q_stages
        n_programs = n_m * B * H
    mode = hopper_mode(problem.spec, problem.head_dim, problem.dtype, horizon)
    return ForwardPlan(blocks, mode, (min(n_programs, n_m * B * H), 1, 1), n_together)


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: KernelCall, blocks: ForwardBlocks | None = None
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D) -> lse (B, H, T) and lse2; fills out, like q. As the plain forward.

    It alone multiplies the queries by their factors itself, where the call has some and registers allow it.
    """
    B, H, T, _ = q.shape
    _, H_kv, S, _ = k.shape
    horizon, factors = call.inputs.horizons is not None, call.inputs.factors
    lse, lse2 = q.new_empty(B, H, T, dtype=torch.float32), rows_like(q)
    if out.numel() == 0 or S == 0:
        return without_keys(out, lse, lse2, call.inputs.sinks)
    blocks, mode, grid, n_together = plan_forward(
        call.problem(q, k), B, H, H_kv, multiprocessors(q.device), horizon, blocks
    )
    if factors is not None and blocks.consumers == 3:  # else their products and softmax would overlap less
        q, factors = scaled_queries(q, factors), None
    alone = blocks.consumers == 1
    launch(
        forward_kernel,
        grid,
        tiles(q, ROWS.value, blocks.columns),
        tiles(k, blocks.k, blocks.columns),
        tiles(v, blocks.k, blocks.columns),
        key_numbers(call, q, S, blocks.k) if is_biased(call.spec.score) else None,
        tiles(out, ROWS.value, blocks.columns),
        Rows(lse, lse2),
        hopper_inputs(call, T, S)._replace(factors=None if factors is None else factor_input(factors)),
        None if alone else torch.zeros(1, dtype=torch.int32, device=q.device),
        launch_scalars(call, n_together),
        BLOCKS=blocks,
        MODE=mode,
        num_warps=4,
        maxnreg=blocks.registers if alone else None,
        enable_fp_fusion=True,
    )
    return lse, lse2


QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of threads that multiply queries


class Result(NamedTuple):
    """Of the queries o_m: o, not yet divided by the row sums l, and lse2."""

    o_m: Any
    o: Any
    l: Any
    lse2: Any


class State(NamedTuple):
    """What a consumer carries from one key tile to the next.

    o     the sum of weights times values, (ROWS, columns), of the tiles before the last one
    p     the weights of the last tile, in 16 bits
    m, l  of each row the maximum and the sum of weights
    numbers  the values that a formula adds to the scores of the next tile, see `load_added`
    """

    o: Any
    p: Any
    m: Any
    l: Any
    numbers: Any


@gluon.jit
def start_outputs(
    o, b_p, i_step, i_n, queries, P_LAYOUT: gl.constexpr, buffers, BLOCKS: gl.constexpr, MODE: gl.constexpr
):
    """((o + p v in flight,), its operands p): the pieces p of the key tile at i_n, whose values came with i_step."""
    N: gl.constexpr = BLOCKS.k // n_pieces(MODE)
    operands = ()
    for j in gl.static_range(n_pieces(MODE)):
        b_p_kept = as_operand(b_p[j], i_n + j * N, queries, P_LAYOUT, buffers.q.dtype, MODE, N)
        b_v = buffers.v.index(i_step % BLOCKS.stages)
        o = warpgroup_mma(b_p_kept, b_v.slice(j * N, N), o, is_async=True)
        operands += (b_p_kept,)  # type: ignore[assignment]
    return (o,), operands


@gluon.jit
def rounded(b_p32, P_LAYOUT: gl.constexpr, dtype: gl.constexpr, MODE: gl.constexpr, N: gl.constexpr):
    """The pieces' weights, kept in 16 bits until the next step."""
    b_p = ()
    for j in gl.static_range(n_pieces(MODE)):
        b_p += (round_weights(b_p32[j], P_LAYOUT, dtype, MODE, N),)  # type: ignore[assignment]
    return b_p


@gluon.jit
def step(
    state, i_step, i_order, i_n, is_cut, queries, keys, buffers, barriers,
    c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """o += p v of the tile before, during the scores and the softmax of the key tile at i_n: the State after it.

    Any m gives the same softmax, as long as no weight overflows. An optimistic step takes the weights with the m of the
    tiles before; where they are too large, or a row has seen no key and m is -inf, it begins again with the scores.

    p comes in pieces of N keys each, of which there are several only where a row's maximum is known in advance. The
    keys of this step have arrived when it starts, and those of the next when it ends.
    """
    o, b_p, m, l, numbers = state
    BN: gl.constexpr = BLOCKS.k
    PIECES: gl.constexpr = n_pieces(MODE)
    N: gl.constexpr = BN // PIECES
    S_LAYOUT: gl.constexpr = m.type.layout.parent
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    dtype: gl.constexpr = buffers.q.dtype
    factor = exponent_factor(queries.scale_log2, MODE)
    stage = stage_of(i_step, BLOCKS.stages)
    keeps_maximum: gl.constexpr = MODE.fixed_max or BLOCKS.optimistic

    if BLOCKS.ping_pong:
        mbarrier.wait(barriers.order.index(c), i_order & 1)
    s_flight = start_scores(stage.index, numbers, queries, buffers, S_LAYOUT, MODE, N)
    # Draws a mask while the scores are computed.
    o_flight, operands = start_outputs(o, b_p, i_step, i_n + BN, queries, P_LAYOUT, buffers, BLOCKS, MODE)

    m_safe = m
    b_p32 = ()
    for j in gl.static_range(PIECES):
        b_s = warpgroup_mma_wait(2 * PIECES - 1 - j, deps=(s_flight[j],))
        if BLOCKS.ping_pong and j == PIECES - 1:
            mbarrier.arrive(barriers.order.index((c + 1) % BLOCKS.consumers))
        b_s = finish_scores(b_s, i_n + j * N, is_cut, queries, N, BLOCKS, MODE)
        shift = tile_shift(i_n, queries, BN, MODE)
        if not keeps_maximum:
            m_tile = gl.convert_layout(row_max(b_s, N, BLOCKS), m.type.layout) * factor + shift
            m, m_safe, alpha = new_maximum(m, m_tile, GROWTH)
            l = l * gl.convert_layout(alpha, L_ROWS)[:, None]
        # (ROWS, N) l is summed before anything is dropped.
        b_p32 += (weights(b_s, factor, m_safe - shift, BLOCKS.optimistic),)  # type: ignore[assignment]
        if not BLOCKS.optimistic:
            l += row_sum(b_p32[j], N)
    if BLOCKS.optimistic:
        l_tile = row_sum(b_p32[0], N)  # type: ignore[misc]
        is_covered = are_small(l_tile, buffers.votes.index(c), BLOCKS.optimistic)
    if MODE.added == "pair":  # room for the values
        b_p = rounded(b_p32, P_LAYOUT, dtype, MODE, N)
    numbers = load_added(i_n - BN, queries, BN, S_LAYOUT, MODE)

    # A wait that ptxas does not move the softmax across: without it, all of it would come after the product with v.
    wait_full(barriers.kv_full, stage_of(i_step + 1, BLOCKS.stages))
    o = warpgroup_mma_wait(0, deps=o_flight + operands)[0]
    if BLOCKS.optimistic:
        if is_covered:
            l += l_tile
        else:
            o, b_p32, m, l = with_maximum(o, m, l, stage.index, i_n, queries, buffers, BLOCKS, MODE)
    release_stage(i_step, keys, buffers, barriers, BLOCKS, MODE)
    if not keeps_maximum:
        o = rescale(o, gl.convert_layout(alpha, O_ROWS), BLOCKS.columns)
    if MODE.added != "pair":
        b_p = rounded(b_p32, P_LAYOUT, dtype, MODE, N)
    return State(o, b_p, m, l, numbers)


@gluon.jit
def with_maximum(o, m, l, i_s, i_n, queries, buffers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(o, weights, m, l) of an optimistic step whose maxima were too low, with maxima that cover the key tile at i_n.

    o, m and l are those before the step; the keys are still in stage i_s.
    """
    BN: gl.constexpr = BLOCKS.k
    S_LAYOUT: gl.constexpr = m.type.layout.parent
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    L_ROWS: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    is_cut: gl.constexpr = MODE.causal or MODE.bounded  # or may be: a branch would cost registers
    factor = exponent_factor(queries.scale_log2, MODE)
    s_flight = start_scores(i_s, 0.0, queries, buffers, S_LAYOUT, MODE, BN)
    b_s = warpgroup_mma_wait(0, deps=s_flight)
    b_s = finish_scores(b_s, i_n, is_cut, queries, BN, BLOCKS, MODE)
    shift = tile_shift(i_n, queries, BN, MODE)
    m_tile = gl.convert_layout(row_max(b_s, BN, BLOCKS), m.type.layout) * factor + shift
    m, m_safe, alpha = new_maximum(m, m_tile, GROWTH)
    b_p32 = weights(b_s, factor, m_safe - shift, BLOCKS.optimistic)
    l = l * gl.convert_layout(alpha, L_ROWS)[:, None] + row_sum(b_p32, BN)
    o = o * gl.convert_layout(alpha, O_ROWS)[:, None]
    return o, (b_p32,), m, l


@gluon.jit
def first_tile(i_step, i_n, is_cut, queries, keys, work, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The State after the last tile of keys that the queries see, at i_n, where o is zero; the queries'
    numbers, and their `row_bias`.

    The keys of the next step have arrived when it ends.
    """
    BD: gl.constexpr = BLOCKS.columns
    PIECES: gl.constexpr = n_pieces(MODE)
    BN: gl.constexpr = BLOCKS.k
    N: gl.constexpr = BN // PIECES
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    buffers, barriers = program.buffers, program.barriers
    factor = exponent_factor(queries.scale_log2, MODE)
    stage = stage_of(i_step, BLOCKS.stages)
    numbers = load_added(i_n, queries, BN, S_LAYOUT, MODE)
    wait_full(barriers.kv_full, stage)
    s_flight = start_scores(stage.index, numbers, queries, buffers, S_LAYOUT, MODE, N)
    b_s = ()
    for j in gl.static_range(PIECES):
        b_s += (warpgroup_mma_wait(0, deps=(s_flight[j],)),)  # type: ignore[assignment]
    release_stage(i_step, keys, buffers, barriers, BLOCKS, MODE)
    scores = ()
    for j in gl.static_range(PIECES):
        scores += (finish_scores(b_s[j], i_n + j * N, is_cut, queries, N, BLOCKS, MODE),)  # type: ignore[assignment]
    shift = tile_shift(i_n, queries, BN, MODE)
    m = gl.convert_layout(tile_max(scores, N, BLOCKS, MODE), S_ROWS) * factor + shift
    if MODE.fixed_max:  # this tile's serves for all: rows with few keys keep the largest weight, 1, unrounded
        m = gl.maximum(m, LEAST_MAXIMUM)
    o_m = queries.i_m + gl.arange(0, ROWS, S_ROWS)
    b_row_bias = row_bias(o_m, queries, MODE)
    if MODE.sinks:  # as if a key without a value had been seen before all others
        m_sink = gl.load(program.inputs.sinks + work.i_h) * LOG2_E + b_row_bias
        m = gl.maximum(m, m_sink)
    m_safe = gl.where(m == -float("inf"), 0.0, m)
    b_p32 = ()
    for j in gl.static_range(PIECES):
        b_p32 += (weights(scores[j], factor, m_safe - shift, BLOCKS.optimistic),)  # type: ignore[assignment]
    l = tile_sum(b_p32, N, MODE)
    if MODE.sinks:  # a quarter for each of a row's four threads
        l += gl.convert_layout(0.25 * gl.exp2(m_sink - m_safe), gl.SliceLayout(1, l.type.layout))[:, None]
    b_p = rounded(b_p32, P_LAYOUT, buffers.q.dtype, MODE, N)
    o = gl.zeros([ROWS, BD], gl.float32, O_LAYOUT)
    numbers = load_added(i_n - BN, queries, BN, S_LAYOUT, MODE)
    wait_full(barriers.kv_full, stage_of(i_step + 1, BLOCKS.stages))
    return State(o, b_p, m, l, numbers), o_m, b_row_bias


@gluon.jit
def row_factors(inputs, work, i_m, T):
    """The factors of s of 64 queries from i_m, as `scale_queries` takes them; 0 where a call has none."""
    factors = 0
    if inputs.factors is not None:
        o_m = i_m + gl.arange(0, ROWS, gl.SliceLayout(1, QUERIES))
        factors = load_factors(inputs.factors, work.i_b, work.i_h, o_m, T)
    return factors


@gluon.jit
def scale_queries(b_q, factors):
    """Multiply 64 queries in shared memory by their factors of s, rounded as `scaled_queries` rounds."""
    b_x = b_q.load(QUERIES).to(gl.float32) * factors[:, None]
    b_q.store(b_x.to(b_q.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def attend(out, rows, keys, work, program, i_step, i_order, c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """out and lse of consumer c's 64 queries of a tile: (i_step, i_order) after it.

    keys: where this consumer fetches them itself, else None.
    """
    CONSUMERS: gl.constexpr = BLOCKS.consumers
    BN: gl.constexpr = BLOCKS.k
    N: gl.constexpr = BN // n_pieces(MODE)
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    buffers, barriers, sizes = program.buffers, program.barriers, program.sizes

    i_bh = work.i_b * sizes.H + work.i_h
    i_m = work.i_m + c * ROWS
    b_q = buffers.q.index(work.stage.index)
    factors = row_factors(program.inputs, work, i_m, sizes.T)  # requested first: their latency passes meanwhile
    queries = load_queries(b_q, program, i_m, work.i_b, work.i_h, S_LAYOUT, BLOCKS, MODE)
    pos = queries.pos
    n_start_all, _, _, n_end_all = key_tiles(work.i_m, pos, CONSUMERS * ROWS, BN, MODE)
    n_start, n_full_start, n_full_end, n_end = key_tiles(i_m, pos, ROWS, BN, MODE)
    if CONSUMERS > 1:
        i_step, i_order = skip(i_step, i_order, n_end_all - n_end, barriers, c, BLOCKS)

    # The last tile that these queries see. The diagonal cuts it, or the end of a sequence that does not fill it.
    i_n = (n_end - 1) * BN
    is_cut = True
    # With other numbers of consumers, and with dropout, this would spill.
    if CONSUMERS == 2 and not (MODE.threshold or MODE.causal or MODE.bounded or MODE.offsets):
        is_cut = i_n + BN > sizes.S
    wait_full(barriers.q_full, work.stage)
    if program.inputs.factors is not None:
        scale_queries(b_q, factors)
    state, o_m, b_row_bias = first_tile(i_step, i_n, is_cut, queries, keys, work, program, BLOCKS, MODE)
    i_step += 1

    for j in range(n_start + 1, n_end):
        i_tile_n = n_end - 1 + n_start - j
        if MODE.bounded:
            is_cut = (i_tile_n >= n_full_end) | (i_tile_n < n_full_start)
        else:  # the end of the sequence cuts the last tile alone
            is_cut = i_tile_n >= n_full_end if MODE.causal else False
        state = step(state, i_step, i_order, i_tile_n * BN, is_cut, queries, keys, buffers, barriers, c, BLOCKS, MODE)
        i_step += 1
        i_order += 1

    result = last_product(state, o_m, b_row_bias, i_step, n_start * BN, queries, keys, work, program, BLOCKS, MODE)
    if CONSUMERS > 1:
        i_step, i_order = skip(i_step + 1, i_order, n_start - n_start_all, barriers, c, BLOCKS)
    write(out, rows, result, i_bh, queries, work, program, c, BLOCKS, MODE)
    return i_step, i_order


@gluon.jit
def last_product(
    state, o_m, b_row_bias, i_step, i_n, queries, keys, work, program, BLOCKS: gl.constexpr, MODE: gl.constexpr
):
    """The Result of a State with the values of the first tile of keys, at i_n."""
    o, b_p, m, l, _ = state
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    buffers, barriers = program.buffers, program.barriers
    o_flight, operands = start_outputs(o, b_p, i_step, i_n, queries, P_LAYOUT, buffers, BLOCKS, MODE)
    if not BLOCKS.out_in_q:
        mbarrier.arrive(barriers.q_empty.index(work.stage.index))
    l_row = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    lse2 = m + gl.log2(l_row) - b_row_bias
    o = warpgroup_mma_wait(0, deps=o_flight + operands)[0]
    if BLOCKS.consumers > 1 or BLOCKS.q_stages > 1:
        release_stage(i_step, keys, buffers, barriers, BLOCKS, MODE)
    return Result(o_m, o, l_row, lse2)


@gluon.jit
def write(out, rows, result, i_bh, queries, work, program, c: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """out and lse of the 64 queries."""
    o_m, o, l_row, lse2 = result
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    sizes, barriers, i_m = program.sizes, program.barriers, queries.i_m
    # Kept weights are rescaled once, here, by the inverse of the keep probability.
    o = o * gl.convert_layout(KEEP_SCALE / l_row, O_ROWS)[:, None]
    # Rows that see no key are zero. l = 0 does not identify them, as scores of -inf give it too.
    if MODE.bounded or MODE.offsets:
        if MODE.documents or not as_bits(BLOCKS, MODE):
            first, end = queries.interval
        else:
            first, end = key_interval(i_m + gl.arange(0, ROWS, O_ROWS), queries.pos, MODE)
        o = gl.where((gl.convert_layout(first, O_ROWS) < gl.convert_layout(end, O_ROWS))[:, None], o, 0.0)
    elif MODE.causal:
        o = gl.where((i_m + gl.arange(0, ROWS, O_ROWS) >= sizes.T - sizes.S)[:, None], o, 0.0)
    b_out = program.buffers.out.index(work.stage.index if BLOCKS.out_in_q and BLOCKS.q_stages > 1 else c)
    tma.store_wait(0)
    b_out.store(o.to(out.dtype))
    fence_async_shared()
    take_tile(out, [work.i_b, work.i_h, i_m, 0], b_out)
    if BLOCKS.out_in_q and BLOCKS.consumers > 1:
        tma.store_wait(0)
        mbarrier.arrive(barriers.q_empty.index(work.stage.index))
    store_lse(rows, lse2, i_bh, sizes.T, o_m)
