"""The sum of every rank's terms in the order of exchange.py, in Triton: one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # sums per program


@triton.jit
def add_pairwise_kernel(p_terms, p_sum, N, COUNT: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of N sums of COUNT terms, at most 2^LEVELS. Grid: blocks."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_term = tl.arange(0, 2**LEVELS)
    mask = (o_term < COUNT)[:, None] & (o_n < N)[None, :]
    # Nothing that is added to -0 changes, not even another -0.
    b_x = tl.load(p_terms + o_term.to(tl.int64)[:, None] * N + o_n[None, :], mask=mask, other=-0.0).to(tl.float32)
    for _ in tl.static_range(LEVELS):
        pairs = tl.reshape(b_x, (b_x.shape[0] // 2, 2, BLOCK))
        b_left, b_right = tl.split(tl.permute(pairs, (0, 2, 1)))
        b_x = b_left + b_right
    tl.store(p_sum + o_n, tl.reshape(b_x, (BLOCK,)), mask=o_n < N)


def launch_add_pairwise(terms: Tensor, out: Tensor) -> None:
    """Fill out (N,), fp32, with the sum of terms (ranks, N), whose rows lie one after the other."""
    count, N = terms.shape
    grid, levels = (triton.cdiv(N, BLOCK),), (count - 1).bit_length()
    with torch.cuda.device_of(terms):
        add_pairwise_kernel[grid](terms, out, N, count, levels, BLOCK, enable_fp_fusion=True)
