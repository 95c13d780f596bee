"""ds, the gradient of the scores, in device memory: where a formula adds a number to each score that is learned.

The backward's program for a tile of keys has ds in its registers, and writes it for the query tiles that it visits. For
all others `fill_unseen` writes zeros before the plain kernel, and the producer of the Hopper kernel meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import KernelCall, Mode
from .configs import Blocks
from .formula import added_by, kernel_inputs, written
from .score import locate, seeing_queries
from .tiles import launch_scalars

MOST = 2**30  # the most elements of ds that are written where fewer values are learned


class Targets(NamedTuple):
    """The parts of ds that a backward writes if they are needed.

    sums  (B, H, S): along the columns, as `sums_of` in formula.py says
    ds    (B, H, T, S)
    """

    sums: Any
    ds: Any


@triton.jit
def is_far(x, distance):
    """Whether pairs of a distance share the number of the furthest; x is a vector of distances as `kernel_inputs` has
    it."""
    return distance - (x[4] >> 2) >= (x[3] >> 2) - 1


def slopes_gradient(sums: Tensor) -> Tensor:
    """The gradient of ALiBi's slopes (H,), of the sums of ds (i - j)."""
    return -sums.sum((0, 2), dtype=torch.float64).float()


def writes_ds(call: KernelCall, q: Tensor, k: Tensor) -> bool:
    """Whether the backward writes ds: if a learned tensor's gradient is ds, or is not much smaller."""
    score, number = call.spec.score, None
    if added_by(score) == "pair":
        number = written(score).added
    if number not in call.spec.learned:
        return False
    count = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return count <= max(MOST, call.inputs.formula[number].numel())


@triton.jit
def unseen_kernel(ds, T, S, H, inputs, scalars, BLOCKS: tl.constexpr, MODE: tl.constexpr):
    """Zeros in ds (B, H, T, S) for the query tiles that a tile of keys' program does not visit. Grid: tiles, B x H."""
    BM: tl.constexpr = BLOCKS.q
    BN: tl.constexpr = BLOCKS.k
    i_n, i_bh = tl.program_id(0) * BN, tl.program_id(1)
    pos = locate(T, S, inputs, scalars, i_bh // H, i_bh, 1)
    start, _, _, end = seeing_queries(i_n, pos, BLOCKS, MODE)
    start = tl.minimum(start, tl.cdiv(T, BM) * BM)
    end = tl.maximum(tl.cdiv(tl.maximum(end, 0), BM) * BM, start)
    o_m, o_n = tl.arange(0, BM)[:, None], (i_n + tl.arange(0, BN))[None, :]
    zeros = tl.zeros([BM, BN], tl.float32)
    p_ds = ds + tl.cast(i_bh, tl.int64) * T * S
    for i_m in range(0, start, BM):
        tl.store(p_ds + (i_m + o_m).to(tl.int64) * S + o_n, zeros, mask=(i_m + o_m < T) & (o_n < S))
    for i_m in range(end, T, BM):
        tl.store(p_ds + (i_m + o_m).to(tl.int64) * S + o_n, zeros, mask=(i_m + o_m < T) & (o_n < S))


def fill_unseen(ds: Tensor, call: KernelCall, rows: int, keys: int, mode: Mode) -> None:
    """Write the zeros of ds, of which the backward writes tiles of so many queries and keys."""
    B, H, T, S = ds.shape
    blocks = Blocks(rows, keys, 8, 1)
    inputs = kernel_inputs(call, T, S)._replace(formula=None)
    unseen_kernel[(triton.cdiv(S, keys), B * H)](
        ds, T, S, H, inputs, launch_scalars(call, 1), BLOCKS=blocks, MODE=mode, num_warps=8, enable_fp_fusion=True
    )


def room_for_ds(call: KernelCall, q: Tensor, k: Tensor) -> Tensor | None:
    """Room for ds where the backward writes it."""
    if not writes_ds(call, q, k):
        return None
    return torch.empty(*q.shape[:3], k.shape[2], dtype=torch.float32, device=q.device)
