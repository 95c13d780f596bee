"""Logits to the gradient of their cross-entropy, row by row and in place, in Triton.

    loss_i = lse_i - x_{i, target_i},      dx_ij = exp(x_ij - lse_i) - [j = target_i]

Each row is read twice, the second time from the L2 cache, and written once: a third of the traffic of separate
softmax, loss and gradient kernels. The log-sum-exp is accumulated online (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORE_INDEX = tl.constexpr(-100)


@triton.jit
def softmax_gradient_kernel(p_x, p_targets, p_losses, stride, vocab_size, V, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    p_row = p_x + i * stride
    target = tl.load(p_targets + i)
    # Read before the second loop overwrites it. A target outside the vocabulary makes the loss NaN.
    known = (target >= 0) & (target < vocab_size)
    x_target = tl.load(p_row + target, mask=known, other=float("nan")).to(tl.float32)

    # Masks end at V, a multiple of 64, so that loads and stores are 16 bytes wide; vocab_size may be odd.
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_x, mask=o_x < V, other=float("-inf")).to(tl.float32)
        b_x = tl.where(o_x < vocab_size, b_x, float("-inf"))
        m_new = tl.maximum(m, tl.max(b_x, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(b_x - m_new), axis=0)
        m = m_new
    lse = m + tl.log(s)

    kept = target != IGNORE_INDEX
    for start in range(0, V, BLOCK):
        o_x = start + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_x, mask=o_x < V, other=float("-inf")).to(tl.float32)
        b_x = tl.where(o_x < vocab_size, b_x, float("-inf"))
        b_dx = tl.exp(b_x - lse) - tl.where(o_x == target, 1.0, 0.0)
        tl.store(p_row + o_x, tl.where(kept, b_dx, 0.0).to(p_x.dtype.element_ty), mask=o_x < V)
    tl.store(p_losses + i, tl.where(kept, lse - x_target, 0.0))


def launch_softmax_gradient(x: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Turn logits x (rows, V) into the gradient of their summed loss; returns the losses (rows,) in fp32.

    targets (rows,) int64, contiguous; -100 makes a row's loss and gradient zero. Columns from vocab_size on get zero.
    """
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        softmax_gradient_kernel[(len(x),)](
            x, targets, losses, x.stride(0), vocab_size, x.shape[1], BLOCK=2048, num_warps=4
        )
    return losses
