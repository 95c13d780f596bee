"""Logits to the gradient of their cross-entropy, row by row and in place, in Triton.

    loss_i = lse_i - x_{i, target_i},      dx_ij = exp(x_ij - lse_i) - [j = target_i]

or, with a cap c, the same of c tanh(x / c), and dx times 1 - tanh(x / c)^2.

Each row is read twice, the second time from the L2 cache, and written once: a third of the traffic of separate
softmax, loss and gradient kernels. Each thread accumulates a log-sum-exp online (Milakov and Gimelshein 2018),
eight columns at a time, which one load fetches in 16 bits. The threads' results are joined at the end of the row. A row
has a program of 1,024 threads, so only two rows per multiprocessor are in flight, and they fit the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu import INTERPRET

IGNORE_INDEX = tl.constexpr(-100)
LOG2_E = tl.constexpr(1.4426950408889634)
WARPS = 32
LANES = 32 * WARPS


@triton.jit
def accumulate(m, s, b_x):
    """Add columns b_x (LANES, 8) to each lane's maximum m (LANES,) and sum s of exp(x - m)."""
    m_new = tl.maximum(m, tl.max(b_x, axis=1))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) * LOG2_E  # while all columns were -inf
    s = s * tl.exp2(m * LOG2_E - shift) + tl.sum(tl.exp2(b_x * LOG2_E - shift[:, None]), axis=1)
    return m_new, s


@triton.jit
def capped(b_x, CAP: tl.constexpr, EXACT: tl.constexpr):
    """c tanh(x / c) of logits, or x where there is no cap c."""
    if CAP is not None:
        if EXACT:
            b_x = CAP - 2.0 * CAP / (tl.exp2(b_x * (2.0 * LOG2_E / CAP)) + 1.0)
        else:  # off by 2^-11 of itself, where bf16 is off by 2^-9
            asm: tl.constexpr = "tanh.approx.f32 $0, $1;"
            b_x *= 1.0 / CAP
            b_x = CAP * tl.inline_asm_elementwise(asm, "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    return b_x


@triton.jit
def uncapped_gradient(b_dx, b_x, CAP: tl.constexpr):
    """The gradient of logits, from the gradient b_dx of the capped ones, b_x."""
    if CAP is not None:
        b_dx = b_dx * (1.0 - b_x * b_x * (1.0 / (CAP * CAP)))
    return b_dx


@triton.jit
def softmax_gradient_kernel(p_x, p_targets, p_losses, stride, vocab_size, V, LANES: tl.constexpr, CAP: tl.constexpr):
    """One row of logits, which becomes its gradient, and its loss. Grid: rows."""
    i = tl.program_id(0).to(tl.int64)
    EXACT: tl.constexpr = INTERPRET or p_x.dtype.element_ty != tl.bfloat16
    p_row = p_x + i * stride
    target = tl.load(p_targets + i)
    # Read before it is overwritten. A target outside the vocabulary makes the loss NaN.
    has_target = (target >= 0) & (target < vocab_size)
    x_target = capped(tl.load(p_row + target, mask=has_target, other=float("nan")).to(tl.float32), CAP, EXACT)

    BLOCK: tl.constexpr = 8 * LANES
    o_x = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    unmasked = vocab_size // BLOCK * BLOCK  # columns in blocks that need no mask
    # Masks end at V, a multiple of 64, so that loads and stores are 16 bytes wide; vocab_size may be odd.
    in_row, in_vocabulary = unmasked + o_x < V, unmasked + o_x < vocab_size

    m = tl.full((LANES,), float("-inf"), tl.float32)
    s = tl.full((LANES,), 0.0, tl.float32)
    for start in range(0, unmasked, BLOCK):
        m, s = accumulate(m, s, capped(tl.load(p_row + start + o_x).to(tl.float32), CAP, EXACT))
    b_x = capped(tl.load(p_row + unmasked + o_x, mask=in_row, other=0.0).to(tl.float32), CAP, EXACT)
    m, s = accumulate(m, s, tl.where(in_vocabulary, b_x, float("-inf")))
    row_max = tl.max(m, axis=0)
    lse = row_max + tl.log(tl.sum(s * tl.exp2((m - row_max) * LOG2_E), axis=0))

    counts = target != IGNORE_INDEX
    lse2 = tl.where(counts, lse * LOG2_E, float("inf"))  # infinity makes the gradient of an ignored row zero
    for start in range(0, unmasked, BLOCK):
        b_x = capped(tl.load(p_row + start + o_x).to(tl.float32), CAP, EXACT)
        b_dx = uncapped_gradient(tl.exp2(b_x * LOG2_E - lse2), b_x, CAP)
        tl.store(p_row + start + o_x, b_dx.to(p_x.dtype.element_ty))
    b_x = capped(tl.load(p_row + unmasked + o_x, mask=in_row, other=0.0).to(tl.float32), CAP, EXACT)
    b_dx = tl.where(in_vocabulary, uncapped_gradient(tl.exp2(b_x * LOG2_E - lse2), b_x, CAP), 0.0)
    tl.store(p_row + unmasked + o_x, b_dx.to(p_x.dtype.element_ty), mask=in_row)
    tl.debug_barrier()  # the target's column was written by some other thread
    dx_target = uncapped_gradient(tl.exp2(x_target * LOG2_E - lse2) - 1.0, x_target, CAP)
    tl.store(p_row + target, dx_target.to(p_x.dtype.element_ty), mask=has_target)
    tl.store(p_losses + i, tl.where(counts, lse - x_target, 0.0))


def launch_softmax_gradient(x: Tensor, targets: Tensor, vocab_size: int, cap: float | None = None) -> Tensor:
    """Turn logits x (rows, V) into the gradient of their summed loss; returns the losses (rows,) in fp32.

    targets (rows,) int64, contiguous; -100 makes a row's loss and gradient zero. Columns from vocab_size on get zero.
    cap     of the logits, which are given without it; None: no cap
    """
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    written = (vocab_size // (8 * LANES) + 1) * 8 * LANES  # columns: the kernel ends with the vocabulary's last block
    if written < x.shape[1]:
        x[:, written:] = 0
    with torch.cuda.device_of(x):
        softmax_gradient_kernel[(len(x),)](
            x,
            targets,
            losses,
            x.stride(0),
            vocab_size,
            x.shape[1],
            LANES=LANES,
            CAP=cap,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return losses
