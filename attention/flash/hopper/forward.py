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

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...gpu import multiprocessors
from ..call import KernelCall
from ..factors import factor_input, scaled_queries
from ..formula import is_biased
from ..forward import without_keys
from ..score import locate
from ..tiles import Rows, head_bytes, head_group_size, launch_scalars, rows_like, swizzle
from .added import hopper_inputs, hopper_mode
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
)
from .forward_step import attend
from .key_numbers import key_numbers
from .schedule import Program, Sizes, key_tiles
from .softmax import ROWS
from .stages import Stage
from .tiles import tiles

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
    fetch_queries(q, i_b, i_h, i_m, 0, buffers, barriers, BLOCKS)
    for j in gl.static_range(STAGES):
        fetch_alone(j, j, keys, buffers, barriers, BLOCKS, MODE)
    i_step = 0
    i_order = 0
    if TILES > 1:
        if is_pair:
            fetch_queries(q, i_b, i_h, i_tile * ROWS, 1, buffers, barriers, BLOCKS)
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

    parts: see key_numbers.py; None where a formula adds no number of each key

    Grid: a program for each tile where it is a consumer alone, else at most one for each multiprocessor.
    """
    REGISTERS: gl.constexpr = BLOCKS.registers
    buffers, barriers = allocate(q.dtype, BLOCKS, MODE)
    H, T = q.shape[1], q.shape[2]
    n_tiles = gl.cdiv(T, BLOCKS.consumers * ROWS)
    sizes = Sizes(H, H // k.shape[1], T, k.shape[2], n_tiles, q.shape[0] * H, scalars.n_together >> 2)
    if BLOCKS.consumers == 1:
        consumer_alone(q, k, v, parts, out, rows, Program(inputs, scalars, buffers, barriers, sizes), BLOCKS, MODE)
    # Gluon takes the roles as a literal; the first has the warps of the launch and the registers that are left.
    elif BLOCKS.consumers == 2:
        gl.warp_specialize(
            [
                (consumer, (out, rows, Program(inputs, scalars, buffers, barriers, sizes), 0, BLOCKS, MODE)),
                (consumer, (out, rows, Program(inputs, scalars, buffers, barriers, sizes), 1, BLOCKS, MODE)),
                (producer, (q, k, v, parts, p_work, Program(inputs, scalars, buffers, barriers, sizes), BLOCKS, MODE)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (out, rows, Program(inputs, scalars, buffers, barriers, sizes), 0, BLOCKS, MODE)),
                (consumer, (out, rows, Program(inputs, scalars, buffers, barriers, sizes), 1, BLOCKS, MODE)),
                (consumer, (out, rows, Program(inputs, scalars, buffers, barriers, sizes), 2, BLOCKS, MODE)),
                (producer, (q, k, v, parts, p_work, Program(inputs, scalars, buffers, barriers, sizes), BLOCKS, MODE)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: KernelCall, blocks: ForwardBlocks | None = None
) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D), k and v (B, H_kv, S, D) -> lse (B, H, T) and lse2; fills out, like q. As the plain forward.

    It alone multiplies the queries by their factors itself, where the call has some and registers allow it.
    """
    B, H, T, _ = q.shape
    blocks = blocks or forward_blocks(call.problem(q, k))
    (H_kv, S), factors = k.shape[1:3], call.inputs.factors
    if factors is not None and blocks.consumers == 3:  # else their products and softmax would overlap less
        q, factors = scaled_queries(q, factors), None
    lse, lse2 = q.new_empty(B, H, T, dtype=torch.float32), rows_like(q)
    if out.numel() == 0 or S == 0:
        return without_keys(out, lse, lse2, call.inputs.sinks)
    rows = blocks.consumers * ROWS.value
    n_m = (T + rows - 1) // rows
    alone = blocks.consumers == 1
    n_programs = multiprocessors(q.device)
    n_together = head_group_size(B * H, head_bytes(k), H // H_kv)
    if call.inputs.horizons is not None:
        n_together = max(n_together, min(B * H, HEADS_WITH_HORIZONS))
    if alone:
        n_m = (n_m + blocks.q_stages - 1) // blocks.q_stages
    forward_kernel[(n_m * B * H if alone else min(n_programs, n_m * B * H),)](
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
        MODE=hopper_mode(call, q),
        num_warps=4,
        maxnreg=blocks.registers if alone else None,
        enable_fp_fusion=True,
    )
    return lse, lse2
