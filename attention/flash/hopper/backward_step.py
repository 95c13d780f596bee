"""A step of the backward's consumer: a tile of keys meets a tile of queries, in five products.

A query tile is one part, or two: then the products of one run during the exponentials of the other. For the same reason
a part is worked on in two pieces where that is faster.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...scores.alibi import alibi_bias
from ...scores.soft_cap import soft_cap_tanh, times_derivative
from ..backward import is_far
from ..formula import Place
from ..score import (
    LOG2_E,
    change_scores,
    log2_factor,
    seen_by_query,
)
from .added import is_near, near_numbers, pair_numbers
from .backward_pipeline import SLOTS, WIDTH, part_of, piece_of, row_stride
from .masks import draw_transposed, drop_transposed, load_key, word_layout
from .program import barrier, reinterpret, stage_of, wait_full


@gluon.constexpr_function
def scores_layout(M):
    """Scores of M queries, transposed: (keys, M), 16 keys a warp."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M, 16])


@gluon.constexpr_function
def keys_in_registers(M, BD):
    """Whether k stays in registers, an operand of s in all steps: there is room for it beside the scores of 64 queries.

    At head size 128 there is none.
    """
    return M == 64 and BD == 64


class QueryTile(NamedTuple):
    """The query tile of a step: number i_tile of head i_h, whose ALiBi slope times log2(e) is slope2.

    bias      of each key, where a formula gives it one (see `load_bias`), else 0
    far       see `far_number`
    p_ds      where to write ds for the first query of the head and the first key; 0 if it is not needed
    next_h, next_tile  of the next step
    i_step    of the pipeline
    has_next  whether another step follows with the same keys
    """

    i_h: Any
    i_tile: Any
    slope2: Any
    bias: Any
    far: Any
    p_ds: Any
    next_h: Any
    next_tile: Any
    i_step: Any
    has_next: Any


@gluon.jit
def draw(i_h, i_m, tile, inputs, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Dropout's words for a part's queries from i_m of head i_h; 0 without dropout, and where the dropout warps draw.

    The key is loaded every time: there are no registers to keep it in.
    """
    M: gl.constexpr = BLOCKS.part
    BN: gl.constexpr = BLOCKS.k
    b_w = 0
    if MODE.threshold and not BLOCKS.mask_drawer:
        b_w = draw_transposed(load_key(inputs.key, tile.i_b, i_h), i_m, tile.i_tile * BN, M, BN, 8)
        b_w = gl.convert_layout(b_w, word_layout(BN // 2, M // 2, 8))
    return b_w


@gluon.jit
def pieces(b_x, N: gl.constexpr):
    """b_x (M, n) as N tiles (M, n / N), one or two, in any layouts."""
    b_pieces = (b_x,)
    if N == 2:
        b_pieces = gl.split(b_x.reshape([b_x.shape[0], 2, b_x.shape[1] // 2]).permute((0, 2, 1)))
    return b_pieces


@gluon.jit
def joined(b_pieces):
    """The tile that `pieces` were made of, in any layout."""
    b_x = b_pieces[0]
    if len(b_pieces) == 2:
        b_x = gl.join(b_x, b_pieces[1]).permute((0, 2, 1)).reshape([b_x.shape[0], 2 * b_x.shape[1]])
    return b_x


@gluon.jit
def changed_scores(
    b_s, b_tanh, o_m, o_rows, part, queries, tile, pos, program, BLOCKS: gl.constexpr, MODE: gl.constexpr
):
    """(the scores (BN, M) of what a product has left in b_s, the factor that makes them powers of 2, their derivative).

    Values of distances are not in them yet.
    """
    LAYOUT: gl.constexpr = b_s.type.layout
    scale_log2, i_n = program.scalars.scale_log2, tile.i_tile * BLOCKS.k
    b_slope = 1.0
    factor = log2_factor(scale_log2, MODE)
    if MODE.biased:  # the product has left s with its bias, or s
        factor = scale_log2
        if not BLOCKS.rows_in_products:
            b_s = b_s * scale_log2 + gl.convert_layout(queries.bias, gl.SliceLayout(1, LAYOUT))[:, None]
            factor = 1.0
    elif MODE.formula is not None:
        x = program.inputs.formula
        place = Place(tile.i_b, queries.i_h, o_m[None, :], (i_n + o_rows)[:, None], pos)
        head = MODE.formula.head(x, tile.i_b, queries.i_h)
        row = MODE.formula.row(x, tile.i_b, queries.i_h, place.o_m, pos.T)
        column = MODE.formula.column(x, tile.i_b, queries.i_h, i_n, o_rows[:, None], None)
        b_s, b_slope = MODE.formula.slope(b_s, program.scalars.scale, head, row, column, x, place, False)
    else:
        # For the part's first query: `delta_kernel` adds the difference of the others' bias to lse2.
        i_query = part.i_part + pos.offset
        b_bias = None
        if MODE.alibi:
            b_bias = alibi_bias(queries.slope2, o_m[None, :], o_rows[:, None], i_n, i_query, pos, MODE)
        b_s = change_scores(b_s, b_tanh, b_bias, scale_log2, MODE)
    return b_s, factor, b_slope


@gluon.jit
def add_near_numbers(b_s, o_rows, part, queries, tile, pos, program, BLOCKS: gl.constexpr):
    """(scores (BN, M) with the values of their distances, True), or, if all pairs have that of the furthest, as before.

    Only for scores to which values of distances are added.
    """
    BN: gl.constexpr = BLOCKS.k
    x, i_n = program.inputs.formula[0], tile.i_tile * BN
    near = is_near(x, part.i_m, i_n, BN, pos)
    if near:
        o_queries = gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout))[None, :]
        o_keys = BN - 1 - o_rows[:, None]
        b_numbers = near_numbers(x, tile.i_b, queries.i_h, part.i_m, i_n, o_keys, o_queries, BN, pos)
        b_s += b_numbers * (LOG2_E / program.scalars.scale_log2)
    return b_s, near


@gluon.jit
def drop_weights(b_p_kept, b_w, part, i_step, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """The weights (BN, M) with zeros where dropout drops them, by its words b_w, or by those that warps have drawn."""
    BN: gl.constexpr = BLOCKS.k
    M: gl.constexpr = b_p_kept.shape[1]
    if BLOCKS.mask_drawer:
        wait_full(program.barriers.words_full, stage_of(i_step, BLOCKS.stages))
        b_w = part.words.load(word_layout(BN // 2, M // 2, 8))
    return drop_transposed(b_p_kept, b_w, MODE.threshold, M, BN)


@gluon.jit
def weights(
    b_s, b_w, part, is_cut, queries, tile, pos, program,
    P_LAYOUT: gl.constexpr, BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """(BN, M) of M queries, a part or a piece of it: p times the derivative of the scores, and ~p in 16 bits."""
    BN: gl.constexpr = BLOCKS.k
    LAYOUT: gl.constexpr = b_s.type.layout
    o_m = part.i_m + gl.arange(0, b_s.shape[1], gl.SliceLayout(0, LAYOUT))
    o_rows = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))
    b_tanh = soft_cap_tanh(b_s, program.scalars.scale_log2, MODE) if MODE.soft_cap is not None else None
    b_s, factor, b_slope = changed_scores(
        b_s, b_tanh, o_m, o_rows, part, queries, tile, pos, program, BLOCKS, MODE
    )  # fmt: skip
    if MODE.added == "distance":
        b_s, near = add_near_numbers(b_s, o_rows, part, queries, tile, pos, program, BLOCKS)
    if is_cut:
        b_s = gl.where(seen_by_query(tile.i_tile * BN + o_rows, o_m[None, :], pos, MODE), b_s, -float("inf"))
    b_lse2 = 0.0 if BLOCKS.rows_in_products else part.lse2.load(LAYOUT)
    if MODE.added == "distance":
        b_lse2 = b_lse2 - gl.where(near, 0.0, queries.far)
    b_p = gl.exp2(b_s * factor - b_lse2)
    b_p_kept = gl.convert_layout(b_p.to(part.q.dtype), P_LAYOUT)
    b_p = times_derivative(b_p, b_tanh, MODE)  # so that tanh leaves the registers
    if MODE.formula is not None and MODE.formula.has_slope:
        b_p = gl.where(b_p > 0, b_p * b_slope, 0.0)  # it may have no value where a query does not see a key
    if MODE.threshold:
        b_p_kept = drop_weights(b_p_kept, b_w, part, queries.i_step, program, BLOCKS, MODE)
    return b_p, b_p_kept


@gluon.jit
def score_gradients(b_p, b_p_kept, b_dp, part, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(BN, M): ds, from the results of `weights` and dp."""
    LAYOUT: gl.constexpr = b_dp.type.layout
    b_delta = 0.0 if BLOCKS.rows_in_products else part.delta.load(LAYOUT)
    if MODE.threshold:
        # b_p_kept still holds the weights that dropout kept: the mask need not be applied to dp as well.
        b_kept = gl.convert_layout(b_p_kept, LAYOUT)
        if MODE.soft_cap is not None or (MODE.formula is not None and MODE.formula.has_slope):
            b_ds32 = b_p * (gl.where(b_kept != 0.0, b_dp, 0.0) - b_delta)
        else:
            b_ds32 = b_kept.to(gl.float32) * b_dp - b_p * b_delta
    else:
        b_ds32 = b_p * (b_dp - b_delta)
    return b_ds32


@gluon.jit
def add_to_dv(b_s, b_w, b_dv, part, is_cut, queries, tile, pos, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(p, ~p, dv + ~p^T do in flight), of `weights`: p and ~p in pieces.

    The product of a piece runs during the exponentials of the next. The branch for a cut tile keeps them in this order:
    without it the compiler takes all exponentials before the second product.
    """
    BN: gl.constexpr = BLOCKS.k
    N: gl.constexpr = BLOCKS.pieces
    M: gl.constexpr = BLOCKS.part // N
    LAYOUT: gl.constexpr = scores_layout(M)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_dv.type.layout, 2)
    DRAWN: gl.constexpr = MODE.threshold and not BLOCKS.mask_drawer
    s_pieces = pieces(b_s, N)
    w_pieces = pieces(b_w, N) if DRAWN else (0, 0)
    b_p = ()
    b_p_kept = ()
    for j in gl.static_range(N):
        piece = piece_of(part, j, BLOCKS)
        s_piece = gl.convert_layout(s_pieces[j], LAYOUT)
        w_piece = gl.convert_layout(w_pieces[j], word_layout(BN // 2, M // 2, 8)) if DRAWN else 0
        p_piece, kept_piece = weights(
            s_piece, w_piece, piece, is_cut, queries, tile, pos, program, P_LAYOUT, BLOCKS, MODE
        )
        b_dv = warpgroup_mma(kept_piece, piece.do, b_dv, is_async=True)
        b_p += (p_piece,)  # type: ignore[assignment]
        b_p_kept += (kept_piece,)  # type: ignore[assignment]
    return b_p, b_p_kept, b_dv


@gluon.jit
def along(b_x):
    """(BN, 4) of (BN, M): what each of a key's four threads holds of it, summed."""
    return gl.sum(gl.sum(b_x.reshape([b_x.shape[0], b_x.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def along_times_position(b_x, LAYOUT: gl.constexpr):
    """`along` of b_x (BN, M) times the number of its column less that of a thread's first, by sums alone."""
    BN: gl.constexpr = b_x.shape[0]
    N: gl.constexpr = b_x.shape[1] // 8  # a thread has columns 8 n and 8 n + 1
    even, odd = gl.split(b_x.reshape([BN, N, 4, 2]))
    b_total = gl.convert_layout(gl.sum(odd, 1), LAYOUT)
    b_x = even + odd
    for i in gl.static_range(3 if N == 8 else 2):  # the digits of n
        even, odd = gl.split(b_x.reshape([BN, N >> (i + 1), 2, 4]).permute((0, 1, 3, 2)))
        b_total += gl.convert_layout(gl.sum(odd, 1), LAYOUT) * (8 << i)
        b_x = even + odd
    return b_total


@gluon.jit
def no_sums(BLOCKS: gl.constexpr):
    """Zeros, to which `add_to_dk` adds: (BN, 8) for products with ones, else (BN, 4); 0 where nothing is summed."""
    BN: gl.constexpr = BLOCKS.k
    M: gl.constexpr = BLOCKS.part // BLOCKS.pieces
    b_sum = 0.0
    if BLOCKS.sums == "ds":
        b_sum = gl.zeros([BN, 8], gl.float32, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 8, 16]))
    elif BLOCKS.sums is not None:
        b_sum = along(gl.zeros([BN, M], gl.float32, scores_layout(M)))
    return b_sum


@gluon.jit
def weighted_sums(b_ds, i_m, i_n, pos, program, BLOCKS: gl.constexpr):
    """(BN, 4): ds (BN, M) of the queries from i_m and the keys from i_n, times weights, along the columns."""
    M: gl.constexpr = b_ds.shape[1]
    BN: gl.constexpr = b_ds.shape[0]
    LAYOUT: gl.constexpr = b_ds.type.layout
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))[:, None]
    distance = i_m + pos.offset - i_n  # of the first pair
    if BLOCKS.sums == "distance":
        b_sum = along(b_ds)
        SUM: gl.constexpr = b_sum.type.layout
        first = (distance - gl.arange(0, BN, gl.SliceLayout(1, SUM)))[:, None]  # of a thread's first column
        first = first + 2 * gl.arange(0, 4, gl.SliceLayout(0, SUM))[None, :]
        b_sum = along_times_position(b_ds, SUM) + b_sum * first.to(gl.float32)
    else:
        x = program.inputs.formula[0]
        if is_near(x, i_m, i_n, BN, pos):
            o_m = gl.arange(0, M, gl.SliceLayout(0, LAYOUT))[None, :]
            b_sum = along(gl.where(is_far(x, distance + o_m - o_n), b_ds, 0.0))
        else:
            b_sum = along(b_ds)
    return b_sum


@gluon.jit
def write_ds(p_ds, b_ds, i_m, i_n, pos, BLOCKS: gl.constexpr):
    """Write ds (BN, M) of the queries from i_m and the keys from i_n, four keys of a thread at once."""
    M: gl.constexpr = b_ds.shape[1]
    BN: gl.constexpr = b_ds.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [8, 1], [0, 1])
    o_m = gl.arange(0, M // 4, gl.SliceLayout(0, LAYOUT))[None, :]
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))[:, None]
    stride = row_stride(pos.S, BLOCKS)
    p_ds += i_m.to(gl.int64) * stride
    is_whole = (i_m + M <= pos.T) & (i_n + BN <= pos.S)
    b_halves = pieces(b_ds, 2)
    # Values move between threads through shared memory, which has room for a quarter of them.
    for i in gl.static_range(4):
        b_quarter = gl.convert_layout(pieces(b_halves[i // 2], 2)[i % 2], LAYOUT)
        o_quarter = o_m + i * (M // 4)
        if is_whole:
            gl.store(p_ds + o_quarter * stride + o_n, b_quarter, eviction_policy="evict_first")
        else:
            is_there = (i_m + o_quarter < pos.T) & (i_n + o_n < stride)
            gl.store(p_ds + o_quarter * stride + o_n, b_quarter, mask=is_there)


@gluon.jit
def add_to_dk(
    b_p, b_p_kept, b_dp, b_dk, b_sum, part, queries, tile, pos, program, BLOCKS: gl.constexpr, MODE: gl.constexpr
):  # fmt: skip
    """(ds in pieces, (dk + ds^T q in flight, the sums)), from the results of `add_to_dv`.

    The sums of ds are in flight too, a product with ones; others are there. ds is also stored, for dq.
    """
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    N: gl.constexpr = BLOCKS.pieces
    M: gl.constexpr = BLOCKS.part
    LAYOUT: gl.constexpr = scores_layout(M // N)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, b_dk.type.layout, 2)
    dp_pieces = pieces(b_dp, N)
    b_ds = ()
    for j in gl.static_range(N):
        piece = piece_of(part, j, BLOCKS)
        dp_piece = gl.convert_layout(dp_pieces[j], LAYOUT)
        ds_piece32 = score_gradients(b_p[j], b_p_kept[j], dp_piece, piece, BLOCKS, MODE)
        ds_piece = gl.convert_layout(ds_piece32.to(part.q.dtype), P_LAYOUT)
        b_ds += (ds_piece,)  # type: ignore[assignment]
        if j == N - 1:  # all of it at once: the compiler has all warps wait between stores to slices of a tile
            part.ds.store(gl.convert_layout(joined(b_ds), scores_layout(M)))
        b_dk = warpgroup_mma(ds_piece, piece.q, b_dk, is_async=True)
        if BLOCKS.writes_ds:
            write_ds(queries.p_ds, ds_piece32 * KEEP_SCALE, piece.i_m, tile.i_tile * BLOCKS.k, pos, BLOCKS)
        if BLOCKS.sums == "ds":
            b_sum = warpgroup_mma(ds_piece, program.buffers.sum_ones.permute((1, 0)), b_sum, is_async=True)
        elif BLOCKS.sums is not None:
            b_sum += weighted_sums(ds_piece32, piece.i_m, tile.i_tile * BLOCKS.k, pos, program, BLOCKS)
    return b_ds, (b_dk, b_sum) if BLOCKS.sums == "ds" else (b_dk,), b_sum


@gluon.jit
def unknown_zero(i):
    """0, hidden from the compiler, so that addresses with it are computed in each step i of a loop.

    Computed before the loop, the addresses of all operands would be kept in registers, and spill.
    """
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [i], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def load_added(i_h, i_m, tile, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """(BN, M): the values that a formula adds for pairs of a part's M queries from i_m, for `product`; else 0."""
    numbers = 0.0
    if MODE.added == "pair":
        M: gl.constexpr = BLOCKS.part
        BN: gl.constexpr = BLOCKS.k
        LAYOUT: gl.constexpr = scores_layout(M)
        o_m = gl.arange(0, M, gl.SliceLayout(0, LAYOUT))[None, :]
        o_n = gl.arange(0, BN, gl.SliceLayout(1, LAYOUT))[:, None]
        numbers = pair_numbers(program.inputs.formula[0], tile.i_b, i_h, i_m, tile.i_tile * BN, o_m, o_n)
    return numbers


@gluon.jit
def product(a, b, part, i: gl.constexpr, numbers, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """In flight: a b^T (BN, M), less lse2 (i = 0) or delta (1) of each query where they come with the products.

    numbers: see `load_added`; they are added where i = 0.
    """
    M: gl.constexpr = BLOCKS.part
    BN: gl.constexpr = BLOCKS.k
    ADDED: gl.constexpr = MODE.added == "pair" and i == 0
    b_c = gl.zeros([BN, M], gl.float32, scores_layout(M))
    if ADDED:
        b_c = numbers * (LOG2_E / program.scalars.scale_log2)
    if BLOCKS.rows_in_products:
        ones = program.buffers.ones.index(i)
        b_c = warpgroup_mma(ones, part.parts.permute((1, 0)), b_c, use_acc=ADDED, is_async=True)
        b_c = warpgroup_mma(a, b.permute((1, 0)), b_c, is_async=True)
    else:
        b_c = warpgroup_mma(a, b.permute((1, 0)), b_c, use_acc=ADDED, is_async=True)
    return b_c


@gluon.jit
def done(flight, operands, n: gl.constexpr):
    """The products `flight`, when at most n later ones are in flight; until then registers keep their `operands`."""
    return warpgroup_mma_wait(n, deps=flight + operands)[: len(flight)]


@gluon.jit
def first_scores(b_k, i_step, is_there, numbers, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """In flight: s (BN, M) of the first part of a step's query tile, which has then arrived."""
    stage = stage_of(i_step, BLOCKS.stages)
    wait_full(program.barriers.full, stage, is_there)
    part = part_of(0, stage.index, 0, program.buffers, BLOCKS)
    return product(b_k, part.q, part, 0, numbers, program, BLOCKS, MODE)


@gluon.jit
def give_dq(b_dq, slot, is_first, is_last, scalars, buffers, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """Write dq of a query tile to a slot: as fp32 values for the workspace, or all of it in 16 bits.

    The workspace holds a tile in the order of the registers, and nothing is shuffled: (registers, threads).
    """
    BM: gl.constexpr = BLOCKS.q
    BD: gl.constexpr = BLOCKS.columns
    # Warps along the rows and columns; each has DN columns.
    WM: gl.constexpr = BM // 16
    WN: gl.constexpr = 8 // WM
    DN: gl.constexpr = BD // WN
    KEEP_SCALE: gl.constexpr = 256 / (256 - MODE.threshold)
    LAYOUT: gl.constexpr = b_dq.type.layout
    dtype: gl.constexpr = buffers.q.dtype
    b_dq = b_dq.reshape([WM, 2, 8, WN, DN // 8, 4, 2]).permute((4, 3, 0, 2, 5, 1, 6)).reshape([BM * BD // WIDTH, WIDTH])
    if is_last & (not is_first):
        b_dq = b_dq + slot.load(b_dq.type.layout)
        barrier()
    if is_last:
        b_dq16 = (b_dq * (scalars.scale * KEEP_SCALE)).to(dtype).reshape([DN // 8, WN, WM, 8, 4, 2, 2])
        b_dq16 = gl.convert_layout(b_dq16.permute((2, 5, 3, 1, 0, 4, 6)).reshape([BM, BD]), LAYOUT)
        # Half of the slot. Triton 3.8 takes only all of it as another tile.
        reinterpret(slot, dtype, [2, BM, BD], buffers.q.layout).index(0).store(b_dq16)
    else:
        slot.store(b_dq)


@gluon.constexpr_function
def products_of(BLOCKS):
    """(matrix products that `product` starts, those that `add_to_dk` starts), as waits count them."""
    return 2 if BLOCKS.rows_in_products else 1, BLOCKS.pieces * (2 if BLOCKS.sums == "ds" else 1)


@gluon.jit
def meet(
    b_s, b_dk, b_dv, b_sum, v_s, part, is_cut, queries, tile, pos, program, BLOCKS: gl.constexpr, MODE: gl.constexpr
):
    """A query tile of one part: (dv in flight, its operands; dk in flight, its operands; the sums)."""
    PIECES: gl.constexpr = BLOCKS.pieces  # a product each, for dv
    dp_flight = product(v_s, part.do, part, 1, 0.0, program, BLOCKS, MODE)
    b_w = draw(queries.i_h, part.i_m, tile, program.inputs, BLOCKS, MODE)
    b_p, b_p_kept, dv_flight = add_to_dv(b_s, b_w, b_dv, part, is_cut, queries, tile, pos, program, BLOCKS, MODE)
    b_dp = warpgroup_mma_wait(PIECES, deps=(dp_flight,))
    b_ds, dk_flight, b_sum = add_to_dk(
        b_p, b_p_kept, b_dp, b_dk, b_sum, part, queries, tile, pos, program, BLOCKS, MODE
    )  # fmt: skip
    return dv_flight, b_p_kept, dk_flight, b_ds, b_sum


@gluon.jit
def meet_in_two(
    b_s, b_dk, b_dv, b_sum, b_k, v_s, part, part_1, is_cut, queries, tile, pos, program,
    BLOCKS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """`meet` for a query tile of two parts: the products of one run during the exponentials of the other.

    There is neither dropout nor a value of pairs: see `backward_blocks`.
    """
    PIECES: gl.constexpr = BLOCKS.pieces
    IN_PRODUCT: gl.constexpr = products_of(BLOCKS)[0]
    IN_DK: gl.constexpr = products_of(BLOCKS)[1]
    dp_flight = product(v_s, part.do, part, 1, 0.0, program, BLOCKS, MODE)
    s_flight_1 = product(b_k, part_1.q, part_1, 0, 0.0, program, BLOCKS, MODE)
    b_p, b_p_kept, dv_flight = add_to_dv(b_s, 0, b_dv, part, is_cut, queries, tile, pos, program, BLOCKS, MODE)
    dp_flight_1 = product(v_s, part_1.do, part_1, 1, 0.0, program, BLOCKS, MODE)
    # Scores of the second part, dv of the first, and dp of the second may still be in flight.
    b_dp = warpgroup_mma_wait(IN_PRODUCT + PIECES + IN_PRODUCT, deps=(dp_flight,))
    b_ds, dk_flight, b_sum = add_to_dk(
        b_p, b_p_kept, b_dp, b_dk, b_sum, part, queries, tile, pos, program, BLOCKS, MODE
    )  # fmt: skip
    # dp of the second part and dk of the first may.
    b_s, b_dv = done((s_flight_1, dv_flight), b_p_kept, IN_PRODUCT + IN_DK)
    b_p, b_p_kept, dv_flight = add_to_dv(b_s, 0, b_dv, part_1, is_cut, queries, tile, pos, program, BLOCKS, MODE)
    finished = done((dp_flight_1,) + dk_flight, b_ds, PIECES)  # noqa: RUF005 - Triton unpacks no tuple here
    b_dp, b_dk = finished[0], finished[1]
    if BLOCKS.sums == "ds":
        b_sum = finished[2]
    b_ds, dk_flight, b_sum = add_to_dk(
        b_p, b_p_kept, b_dp, b_dk, b_sum, part_1, queries, tile, pos, program, BLOCKS, MODE
    )
    return dv_flight, b_p_kept, dk_flight, b_ds, b_sum


@gluon.jit
def step(b_s, b_dk, b_dv, b_sum, b_k, i_k, queries, tile, pos, program, BLOCKS: gl.constexpr, MODE: gl.constexpr):
    """A tile of keys and values adds up its gradients from a query tile, whose gradient goes through a slot."""
    BM: gl.constexpr = BLOCKS.q
    BD: gl.constexpr = BLOCKS.columns
    M: gl.constexpr = BLOCKS.part
    IN_PRODUCT: gl.constexpr = products_of(BLOCKS)[0]
    IN_DK: gl.constexpr = products_of(BLOCKS)[1]
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [BM // 16, 128 // BM], [16, BM * BD // 128, 16])
    buffers, barriers = program.buffers, program.barriers
    i_tile_m, i_step = queries.i_tile, queries.i_step
    i_s = i_step % BLOCKS.stages
    zero = unknown_zero(i_step)
    k_s, v_s = buffers.k.index(i_k + zero), buffers.v.index(i_k + zero)
    b_k = b_k if keys_in_registers(M, BD) else k_s
    is_cut = i_tile_m < tile.full_start
    if MODE.bounded:
        is_cut |= i_tile_m >= tile.full_end
    is_first = i_tile_m >= tile.first if MODE.bounded or MODE.horizon else tile.i_tile == 0
    part = part_of(i_tile_m * BM, i_s, 0, buffers, BLOCKS)

    # (BN, M): the scores transposed, so that p^T and ds^T go from registers straight into the next product.
    if BM > M:
        part_1 = part_of(i_tile_m * BM, i_s, 1, buffers, BLOCKS)
        dv_flight, b_p_kept, dk_flight, b_ds, b_sum = meet_in_two(
            b_s, b_dk, b_dv, b_sum, b_k, v_s, part, part_1, is_cut, queries, tile, pos, program, BLOCKS, MODE
        )
    else:
        dv_flight, b_p_kept, dk_flight, b_ds, b_sum = meet(
            b_s, b_dk, b_dv, b_sum, v_s, part, is_cut, queries, tile, pos, program, BLOCKS, MODE
        )
    b_dv = done((dv_flight,), b_p_kept, IN_DK)[0]
    numbers = load_added(queries.next_h, queries.next_tile * BM, tile, program, BLOCKS, MODE)
    fence_async_shared()
    barrier()
    zeros_dq = gl.zeros([BM, BD], gl.float32, DQ_LAYOUT)
    dq_flight = warpgroup_mma(buffers.ds.index(zero).permute((1, 0)), k_s, zeros_dq, use_acc=False, is_async=True)
    # QueryTile and their gradients of out are not needed for dq: the producer may bring others while it is in flight.
    finished = done(dk_flight, b_ds, 1)
    b_dk = finished[0]
    if BLOCKS.sums == "ds":
        b_sum = finished[1]
    mbarrier.arrive(barriers.empty.index(i_s))
    s_flight = first_scores(b_k, i_step + 1, queries.has_next, numbers, program, BLOCKS, MODE)
    b_dq = warpgroup_mma_wait(IN_PRODUCT, deps=(dq_flight,))

    slot = stage_of(i_step, SLOTS)
    wait_full(barriers.dq_ready, slot)
    give_dq(b_dq, buffers.dq.index(slot.index), is_first, i_tile_m < tile.last, program.scalars, buffers, BLOCKS, MODE)
    fence_async_shared()
    mbarrier.arrive(barriers.dq_full.index(slot.index))
    b_s = warpgroup_mma_wait(0, deps=(s_flight,))
    return b_s, b_dk, b_dv, b_sum
