"""Horizons of scores that fall with the distance: beyond a horizon all weights are exactly zero, and kernels skip the
tiles.

With ALiBi, each head has one distance. Scores and slopes are in base 2. Let `bound` be the scale times the largest norm
of a head's queries times that of its keys. Before ALiBi no score is larger. A causal query sees the key at its
position, with a bias of 0, so a row's maximum is at least -bound. A key at distance d scores at most bound - slope d,
and has at most the weight 2^(2 bound - slope d). Where fp32 rounds that to zero, the key adds nothing to l, o, dq, dk
and dv. The plain forward begins with the far keys. Its sums over them are rescaled by the same tiny factor when it
reaches the key at the query's position.

A soft cap bounds the scores too. A sink only raises the maximum. Windows and documents never hide the key at the
query's position. Values that are not finite, and slopes that are not positive, give no horizon.

A formula that adds a value x_j to the scores of key j gives that key at most the weight 2^(|q_i| K + x_j - s_i - x_i),
where s_i and x_i belong to the key at the query's position, and K is the scale times the largest norm of a key. With
the forget gates of the Forgetting Transformer x grows from key to key. Here x is arbitrary: GRAIN queries skip the keys
before the first key whose value is large enough for one of them or for any later query. So the first visible key never
moves back from one group of queries to the next. Norms and s_i are computed only for heads whose values fall by BITS or
more.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gpu
from ..spec import Spec
from .forward import factor_input, load_factors
from .launch import launch
from .score import GRAIN, LOG2_E
from .tiles import load_tile, tiles, unspecialised

# Weights of 2^-150 and less round to zero. 8 more bits are for maxima that lag behind, see GROWTH in
# hopper/forward.py, and 2 for biases that are rounded.
BITS = tl.constexpr(160.0)
SLACK = tl.constexpr(1.02)  # for scores that are rounded: TF32 and tanh.approx are off by at most 2^-9 of the bound
UNLIMITED = tl.constexpr(2**30)  # for a head without a horizon
ELEMENTS = 2**14  # of the tile of a program that computes norms
ROUNDED = tl.constexpr(2.0**-18)  # relative error of the sum of a key's value and a score
BLOCK = tl.constexpr(256)
TILES = 16  # of GRAIN values that a program reads


@triton.jit
def largest_square(b_x):
    """The largest squared norm of a row of b_x; infinity for NaN."""
    b_squares = tl.sum(b_x * b_x, 1)
    return tl.max(tl.where(b_squares >= 0, b_squares, float("inf")), 0)


@triton.jit
def norms_kernel(x, p_squares, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest squared norm among ROWS rows; infinity for NaN. Grid: tiles of a head x batch x heads."""
    H, n_tiles = x.shape[1], tl.cdiv(x.shape[2], ROWS)
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    b_x = load_tile(x, i_bh // H, i_bh % H, i_tile * ROWS, ROWS, COLUMNS).to(tl.float32)
    tl.store(p_squares + tl.program_id(0), largest_square(b_x))


@triton.jit
def largest(p_x, n):
    """The largest of n values, none of them negative."""
    b_x = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_x = tl.maximum(b_x, tl.load(p_x + o, mask=o < n, other=0.0))
    return tl.max(b_x, 0)


@triton.jit(do_not_specialize=["H", "G", "n_q", "n_k", "scale_log2", "cap_log2"])
def horizons_kernel(p_horizons, p_q_squares, p_k_squares, slopes, H, G, n_q, n_k, scale_log2, cap_log2):
    """The horizon of a head, of the squared norms of n_q tiles of queries and n_k of keys. Grid: batch x heads."""
    i_bh = tl.program_id(0)
    q_square = largest(p_q_squares + i_bh * n_q, n_q)
    k_square = largest(p_k_squares + i_bh // G * n_k, n_k)
    slope2 = tl.load(slopes + i_bh % H) * LOG2_E
    bound = tl.minimum(tl.sqrt(q_square) * tl.sqrt(k_square) * scale_log2, cap_log2) * SLACK
    distance = (BITS + 2 * bound) / slope2
    is_limited = (q_square < float("inf")) & (k_square < float("inf")) & (slope2 > 0) & (distance < UNLIMITED)
    tl.store(p_horizons + i_bh, tl.where(is_limited, distance + 1, UNLIMITED).to(tl.int32))  # rounded up


def largest_squares(x: Tensor) -> Tensor:
    """(B, H, tiles) fp32: the largest squared norm of a row of x (B, H, T, D), in each tile of rows."""
    B, H, T, D = x.shape
    columns = max(16, triton.next_power_of_2(D))
    rows = min(256, ELEMENTS // columns)
    squares = x.new_empty(B, H, triton.cdiv(T, rows), dtype=torch.float32)
    options = {"ROWS": rows, "COLUMNS": columns, "num_warps": 8, "enable_fp_fusion": True}
    launch(norms_kernel, (squares.numel(),), tiles(x, rows, columns), squares, **options)
    return squares


def find_horizons(q: Tensor, k: Tensor, slopes: Tensor, spec: Spec) -> Tensor:
    """The horizons of q (B, H, T, D) and k (B, H_kv, S, D), none of them empty, as `Inputs` has them."""
    B, H = q.shape[:2]
    q_squares, k_squares = largest_squares(q), largest_squares(k)
    horizons = q.new_empty(B, H, dtype=torch.int32)
    cap = math.inf if spec.score.soft_cap is None else spec.score.soft_cap
    launch(
        horizons_kernel,
        (B * H,),
        horizons,
        q_squares,
        k_squares,
        slopes,
        H,
        H // k.shape[1],
        q_squares.shape[2],
        k_squares.shape[2],
        spec.scale * LOG2_E.value,
        cap * LOG2_E.value,
        enable_fp_fusion=True,
    )
    return horizons


class Bounds(NamedTuple):
    """Bounds of tiles of GRAIN queries or keys of each head, in base 2, with a margin for rounding: (B, H, tiles) each.

    lows   for queries, the smallest value of the keys at their positions
    highs  for keys, the largest value
    owns   for queries, the smallest sum of this value and the score of that key, where the head `may_forget`
    q_squares, k_squares  the largest squared norms, likewise
    """

    lows: Tensor
    highs: Tensor
    owns: Tensor
    q_squares: Tensor
    k_squares: Tensor


@triton.jit
def values_of_head(x, strides, i_bh, H):
    """The address of a head's values of keys; strides: see `extremes_kernel`."""
    return x + (tl.cast(i_bh // H, tl.int64) * (strides[0] >> 2) + tl.cast(i_bh % H, tl.int64) * (strides[1] >> 2))


@triton.jit
def own_values(p_x, o_own, has_own):
    """The values of keys o_own in base 2, less than they may be after rounding."""
    b_x = tl.load(p_x + o_own, mask=has_own, other=0.0) * LOG2_E
    return b_x - tl.abs(b_x) * ROUNDED


@triton.jit(do_not_specialize=["T", "S", "H"])
def extremes_kernel(x, bounds, strides, T, S, H, TILES: tl.constexpr):
    """The lows and highs of TILES tiles. Grid: such groups of the longer of queries and keys, batch x heads.

    x        the values of keys
    strides  of x: of sequences and of heads, as `unspecialised` has them
    """
    i_bh, n_q, n_k = tl.program_id(1), tl.cdiv(T, GRAIN), tl.cdiv(S, GRAIN)
    p_x = values_of_head(x, strides, i_bh, H)
    o_tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    o_m = o_tile[:, None] * GRAIN + tl.arange(0, GRAIN)[None, :]
    o_own = o_m + S - T
    has_own = (o_m < T) & (o_own >= 0)
    b_x = own_values(p_x, o_own, has_own)
    b_low = tl.min(tl.where(has_own, tl.where(b_x > -float("inf"), b_x, -float("inf")), float("inf")), 1)
    tl.store(bounds.lows + i_bh * n_q + o_tile, b_low, mask=o_tile < n_q)
    b_x = tl.load(p_x + o_m, mask=o_m < S, other=-float("inf")) * LOG2_E
    b_x = tl.where(b_x == -float("inf"), b_x, b_x + tl.abs(b_x) * ROUNDED)
    b_high = tl.max(tl.where(b_x < float("inf"), b_x, float("inf")), 1)
    tl.store(bounds.highs + i_bh * n_k + o_tile, b_high, mask=o_tile < n_k)


@triton.jit
def may_forget(bounds, i_bh, n_q, n_k):
    """Whether the values of a head leave some key without weight, if all products of queries and keys are zero."""
    b_low = tl.full([BLOCK], -float("inf"), tl.float32)
    b_high = tl.full([BLOCK], float("inf"), tl.float32)
    for i in range(0, n_q, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_low = tl.maximum(b_low, tl.load(bounds.lows + i_bh * n_q + o, mask=o < n_q, other=-float("inf")))
    for i in range(0, n_k, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_high = tl.minimum(b_high, tl.load(bounds.highs + i_bh * n_k + o, mask=o < n_k, other=float("inf")))
    return tl.min(b_high, 0) + BITS < tl.max(b_low, 0)


@triton.jit(do_not_specialize=["scale_log2"])
def norms_and_owns_kernel(q, k, x, factors, bounds, strides, scale_log2, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The owns and squared norms of tiles of ROWS, which are GRAIN, queries, multiplied by factors if any, and keys.

    x and strides are those of `extremes_kernel`. Nothing else is read or stored for heads that forget nothing. Grid:
    any number of programs for a head; batch x heads.
    """
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], k.shape[2]
    n_q, n_k = tl.cdiv(T, ROWS), tl.cdiv(S, ROWS)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_kv = i_h // (H // H_kv)
    if may_forget(bounds, i_bh, n_q, n_k):
        p_x = values_of_head(x, strides, i_bh, H)
        for i in range(tl.program_id(0), tl.maximum(n_q, n_k), tl.num_programs(0)):
            b_k = load_tile(k, i_b, i_kv, i * ROWS, ROWS, COLUMNS).to(tl.float32)
            if i < n_k:
                tl.store(bounds.k_squares + i_bh * n_k + i, largest_square(b_k))
            if i < n_q:
                b_q = load_tile(q, i_b, i_h, i * ROWS, ROWS, COLUMNS).to(tl.float32)
                o_m = i * ROWS + tl.arange(0, ROWS)
                if factors is not None:
                    b_q = b_q * load_factors(factors, i_b, i_h, o_m, T)[:, None]
                tl.store(bounds.q_squares + i_bh * n_q + i, largest_square(b_q))
                o_own = o_m + S - T
                if S != T:
                    b_k = load_tile(k, i_b, i_kv, tl.maximum(i * ROWS + S - T, 0), ROWS, COLUMNS).to(tl.float32)
                b_norms = tl.sqrt(tl.sum(b_q * b_q, 1)) * tl.sqrt(tl.sum(b_k * b_k, 1))
                b_own = own_values(p_x, o_own, (o_m < T) & (o_own >= 0))
                b_own += (tl.sum(b_q * b_k, 1) - (SLACK - 1) * b_norms) * scale_log2
                # There is no bound for NaN, and for tiles that begin before the first key.
                has_bound = (o_own >= tl.arange(0, ROWS)) & (b_own > -float("inf"))
                b_own = tl.where(o_m < T, tl.where(has_bound, b_own, -float("inf")), float("inf"))
                tl.store(bounds.owns + i_bh * n_q + i, tl.min(b_own, 0))


@triton.jit
def key_norm(bounds, i_bh, n_k, scale_log2):
    """K: the scale times the largest norm of a head's keys, and the margin for rounding."""
    return tl.sqrt(largest(bounds.k_squares + i_bh * n_k, n_k)) * scale_log2 * SLACK


@triton.jit
def least_values(bounds, norm, i_bh, o, n_q):
    """The value from which on a key has weight for one of the queries in the tiles o; infinity beyond the last."""
    b_own = tl.load(bounds.owns + i_bh * n_q + o, mask=o < n_q, other=float("inf"))
    b_norm = tl.sqrt(tl.load(bounds.q_squares + i_bh * n_q + o, mask=o < n_q, other=0.0)) * norm
    return tl.where(b_norm < float("inf"), b_own - b_norm - BITS, -float("inf"))


@triton.jit(do_not_specialize=["G", "n_q", "n_k", "scale_log2"])
def key_horizons_kernel(p_horizons, bounds, G, n_q, n_k, scale_log2):
    """The first key of GRAIN queries, or the end of the queries of GRAIN keys. Grid: n_q + n_k, batch x heads.

    The queries of keys are those of all G heads that share these.
    """
    i, i_bh = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, BLOCK)
    result = 0
    if i < n_q:
        if may_forget(bounds, i_bh, n_q, n_k):
            norm = key_norm(bounds, i_bh, n_k, scale_log2)
            b_least = tl.full([BLOCK], float("inf"), tl.float32)
            for i_q in range(i, n_q, BLOCK):
                b_least = tl.minimum(b_least, least_values(bounds, norm, i_bh, i_q + o, n_q))
            least = tl.min(b_least, 0)
            b_first = tl.full([BLOCK], n_k, tl.int32)
            for i_k in range(0, n_k, BLOCK):
                b_high = tl.load(bounds.highs + i_bh * n_k + i_k + o, mask=i_k + o < n_k, other=-float("inf"))
                b_first = tl.minimum(b_first, tl.where(b_high < least, n_k, i_k + o))
            result = tl.min(b_first, 0)
    else:
        first_head = i_bh // G * G
        for i_head in range(first_head, first_head + G):
            end = n_q
            if may_forget(bounds, i_head, n_q, n_k):
                norm = key_norm(bounds, i_head, n_k, scale_log2)
                b_high = tl.full([BLOCK], -float("inf"), tl.float32)
                for i_k in range(0, i - n_q + 1, BLOCK):
                    seen = i_k + o <= i - n_q
                    b_new = tl.load(bounds.highs + i_head * n_k + i_k + o, mask=seen, other=-float("inf"))
                    b_high = tl.maximum(b_high, b_new)
                most = tl.max(b_high, 0)
                b_end = tl.zeros([BLOCK], tl.int32)
                for i_q in range(0, n_q, BLOCK):
                    b_least = least_values(bounds, norm, i_head, i_q + o, n_q)
                    b_end = tl.maximum(b_end, tl.where((b_least > most) | (i_q + o >= n_q), 0, i_q + o + 1))
                end = tl.max(b_end, 0)
            result = tl.maximum(result, end)
    tl.store(p_horizons + i_bh * (n_q + n_k) + i, result * GRAIN)


def find_key_horizons(q: Tensor, k: Tensor, x: Tensor, factors: Tensor | None, spec: Spec) -> Tensor:
    """The horizons of causal scores s + x_j, of q (B, H, T, D), multiplied by factors if any, k (B, H_kv, S, D) and
    x (B or 1, H or 1, S), as `Inputs` has them."""
    (B, H, T, D), (H_kv, S) = q.shape, k.shape[1:3]
    columns, rows = max(16, triton.next_power_of_2(D)), GRAIN.value
    n_q, n_k = triton.cdiv(T, rows), triton.cdiv(S, rows)
    bounds = Bounds(*(q.new_empty(B, H, n, dtype=torch.float32) for n in (n_q, n_k, n_q, n_q, n_k)))
    steps = (0 if size == 1 else stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    strides, scale_log2 = tuple(map(unspecialised, steps)), spec.scale * LOG2_E.value
    grid = (triton.cdiv(max(n_q, n_k), TILES), B * H)
    launch(extremes_kernel, grid, x, bounds, strides, T, S, H, TILES=TILES, enable_fp_fusion=True)
    n_programs = max(1, 2 * gpu.multiprocessors(q.device) // (B * H))
    launch(
        norms_and_owns_kernel,
        (min(n_programs, max(n_q, n_k)), B * H),
        tiles(q, rows, columns),
        tiles(k, rows, columns),
        x,
        None if factors is None else factor_input(factors),
        bounds,
        strides,
        scale_log2,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=8,
        enable_fp_fusion=True,
    )
    horizons = q.new_empty(B, H, n_q + n_k, dtype=torch.int32)
    grid = (n_q + n_k, B * H)
    launch(key_horizons_kernel, grid, horizons, bounds, H // H_kv, n_q, n_k, scale_log2, enable_fp_fusion=True)
    return horizons
