"""How far ALiBi lets a query see: beyond its head's horizon all weights are exactly zero, and kernels skip the tiles.

Scores and slopes are in base 2. Let `bound` be the scale times the largest norm of a head's queries times that of its
keys. Before ALiBi no score is larger. A causal query sees the key at its position, with a bias of 0, so a row's maximum
is at least -bound. A key at distance d scores at most bound - slope d, and has at most the weight
2^(2 bound - slope d). Where fp32 rounds that to zero, the key adds nothing to l, o, dq, dk and dv. The plain forward
begins with the far keys. Its sums over them are rescaled by the same tiny factor when it reaches the key at the query's
position.

A soft cap bounds the scores too. A sink only raises the maximum. Windows and documents never hide the key at the
query's position. Numbers that are not finite, and slopes that are not positive, give no horizon.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..spec import Spec
from .score import LOG2_E
from .tiles import load_tile, tiles

# Weights of 2^-150 and less round to zero. 8 more bits are for maxima that lag behind, see GROWTH in
# hopper/forward_step.py, and 2 for biases that are rounded.
BITS = tl.constexpr(160.0)
SLACK = tl.constexpr(1.02)  # for scores that are rounded: TF32 and tanh.approx are off by at most 2^-9 of the bound
UNLIMITED = tl.constexpr(2**30)  # for a head without a horizon
ELEMENTS = 2**14  # of the tile of a program that computes norms


@triton.jit
def norms_kernel(x, p_squares, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest squared norm among ROWS rows; infinity for NaN. Grid: tiles of a head x batch x heads."""
    H, n_tiles = x.shape[1], tl.cdiv(x.shape[2], ROWS)
    i_bh, i_tile = tl.program_id(0) // n_tiles, tl.program_id(0) % n_tiles
    b_x = load_tile(x, i_bh // H, i_bh % H, i_tile * ROWS, ROWS, COLUMNS).to(tl.float32)
    b_squares = tl.sum(b_x * b_x, 1)
    tl.store(p_squares + tl.program_id(0), tl.max(tl.where(b_squares >= 0, b_squares, float("inf")), 0))


@triton.jit
def largest(p_x, n):
    """The largest of n numbers, none of them negative."""
    BLOCK: tl.constexpr = 256
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
    norms_kernel[(squares.numel(),)](
        tiles(x, rows, columns), squares, ROWS=rows, COLUMNS=columns, num_warps=8, enable_fp_fusion=True
    )
    return squares


def find_horizons(q: Tensor, k: Tensor, slopes: Tensor, spec: Spec) -> Tensor:
    """The horizons of q (B, H, T, D) and k (B, H_kv, S, D), none of them empty, as `Inputs` has them."""
    B, H = q.shape[:2]
    q_squares, k_squares = largest_squares(q), largest_squares(k)
    horizons = q.new_empty(B, H, dtype=torch.int32)
    cap = math.inf if spec.score.soft_cap is None else spec.score.soft_cap
    horizons_kernel[(B * H,)](
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
