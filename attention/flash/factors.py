"""Factors of s that are the same along a row: they multiply the queries, before any score is computed.

The Hopper forward multiplies each tile of queries in shared memory, see hopper/forward_step.py. Others have the queries
multiplied in a separate pass, and so has every backward, whose tiles of queries are read many times. The product is
rounded to the queries' precision, the same everywhere.

    q' = A q        dq = A dq'        dA = rowsum(dq' q)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import load_tile, store_tile, tiles, unspecialised

ROWS = 64


def factor_input(x: Tensor) -> tuple[Any, ...]:
    """Factors (B or 1, H or 1, T or 1) as a kernel's argument: with their strides, as `unspecialised` has them."""
    strides = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x, *map(unspecialised, strides))


@triton.jit
def load_factors(factors, i_b, i_h, o_m, T):
    """The factors of the queries o_m of a head; 0 beyond the last."""
    p_factors = factors[0] + tl.cast(i_b, tl.int64) * (factors[1] >> 2) + i_h * (factors[2] >> 2)
    return tl.load(p_factors + o_m * (factors[3] >> 2), mask=o_m < T, other=0.0)


@triton.jit
def factors_kernel(x, y, q, sums, factors, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = A x, which may be x itself; where q is given, also sums (B, H, T) = rowsum(x q). Grid: tiles, B x H."""
    H, T = x.shape[1], x.shape[2]
    i_m, i_bh = tl.program_id(0) * ROWS, tl.program_id(1)
    i_b, i_h, o_m = i_bh // H, i_bh % H, i_m + tl.arange(0, ROWS)
    b_x = load_tile(x, i_b, i_h, i_m, ROWS, COLUMNS).to(tl.float32)
    if q is not None:
        b_q = load_tile(q, i_b, i_h, i_m, ROWS, COLUMNS).to(tl.float32)
        tl.store(sums + tl.cast(i_bh, tl.int64) * T + o_m, tl.sum(b_x * b_q, 1), mask=o_m < T)
    store_tile(y, i_b, i_h, i_m, b_x * load_factors(factors, i_b, i_h, o_m, T)[:, None], ROWS, COLUMNS)


def launch(x: Tensor, y: Tensor, factors: Tensor, q: Tensor | None = None, sums: Tensor | None = None) -> None:
    """Launch `factors_kernel`."""
    B, H, T, D = x.shape
    columns = max(16, triton.next_power_of_2(D))
    given = [None if z is None else tiles(z, ROWS, columns) for z in (x, y, q)]
    grid = (triton.cdiv(T, ROWS), B * H)
    factors_kernel[grid](*given, sums, factor_input(factors), ROWS=ROWS, COLUMNS=columns, enable_fp_fusion=True)


def scaled_queries(q: Tensor, factors: Tensor) -> Tensor:
    """q (B, H, T, D), addressable, times its rows' factors."""
    scaled = torch.empty_like(q)
    if q.numel():
        launch(q, scaled, factors)
    return scaled


def scale_gradient(dq: Tensor, q: Tensor, factors: Tensor, learned: bool) -> Tensor | None:
    """Turn the gradient of the scaled queries into that of q, in place; the gradient of the factors if these learn."""
    if not dq.numel():
        return torch.zeros_like(factors) if learned else None
    sums = dq.new_empty(dq.shape[:3], dtype=torch.float32) if learned else None
    launch(dq, dq, factors, q if learned else None, sums)
    if sums is None:
        return None
    shared = [axis for axis, size in enumerate(factors.shape) if size == 1 < sums.shape[axis]]
    return sums.sum(shared, keepdim=True, dtype=torch.float64).float() if shared else sums
