"""The residual stream's dropout masks, in Triton: a call of the generator makes a byte of bits for rows i and i + 8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.dropout.kernel import load_key, philox

BLOCK = 1024  # generator calls per program


@triton.jit
def keep_bit(b_w, BYTE: tl.constexpr, BIT: tl.constexpr, THRESHOLD: tl.constexpr):
    """Bit BIT set where byte BYTE of the word is kept."""
    return (((b_w >> (8 * BYTE)) & 0xFF) >= THRESHOLD).to(tl.uint8) << BIT


@triton.jit
def draw_bits_kernel(p_bits, p_key, B, T, G: tl.constexpr, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of BLOCK generator calls for one site and sequence. Grid: sites x sequences x blocks of calls."""
    n_blocks = tl.cdiv(tl.cdiv(T, 16) * 8 * G, BLOCK)  # of one site and sequence
    i_mask, i_block = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    key = load_key(p_key, i_mask % B, i_mask // B)
    o_call = i_block * BLOCK + tl.arange(0, BLOCK)
    o_r, o_g = o_call // G, o_call % G
    b_w0, b_w1, b_w2, b_w3 = philox(
        key.c0, key.C + o_g.to(tl.uint32), key.c2, key.R + o_r.to(tl.uint32), key.k0, key.k1
    )

    # Bits 4 and 5 of a column choose the word; bit 3 of the row, then bit 3 of the column, the byte from the top.
    b_upper = keep_bit(b_w0, 3, 0, THRESHOLD) | keep_bit(b_w0, 2, 1, THRESHOLD)
    b_upper |= keep_bit(b_w1, 3, 2, THRESHOLD) | keep_bit(b_w1, 2, 3, THRESHOLD)
    b_upper |= keep_bit(b_w2, 3, 4, THRESHOLD) | keep_bit(b_w2, 2, 5, THRESHOLD)
    b_upper |= keep_bit(b_w3, 3, 6, THRESHOLD) | keep_bit(b_w3, 2, 7, THRESHOLD)
    b_lower = keep_bit(b_w0, 1, 0, THRESHOLD) | keep_bit(b_w0, 0, 1, THRESHOLD)
    b_lower |= keep_bit(b_w1, 1, 2, THRESHOLD) | keep_bit(b_w1, 0, 3, THRESHOLD)
    b_lower |= keep_bit(b_w2, 1, 4, THRESHOLD) | keep_bit(b_w2, 0, 5, THRESHOLD)
    b_lower |= keep_bit(b_w3, 1, 6, THRESHOLD) | keep_bit(b_w3, 0, 7, THRESHOLD)

    p_mask = p_bits + i_mask.to(tl.int64) * T * G
    o_i = o_r // 8 * 16 + o_r % 8
    tl.store(p_mask + o_i.to(tl.int64) * G + o_g, b_upper, mask=o_i < T)
    tl.store(p_mask + (o_i + 8).to(tl.int64) * G + o_g, b_lower, mask=o_i + 8 < T)


def launch_draw_bits(key: Tensor, threshold: int, n_sites: int, B: int, T: int, C: int) -> Tensor:
    """(n_sites, B, T, ceil(C / 64) * 8) uint8, as model/dropout.py lays them out; `key` packed, on the GPU."""
    G = -(-C // 64) * 8
    bits = torch.empty(n_sites, B, T, G, dtype=torch.uint8, device=key.device)
    n_blocks = triton.cdiv(triton.cdiv(T, 16) * 8 * G, BLOCK)
    with torch.cuda.device_of(key):
        draw_bits_kernel[(n_sites * B * n_blocks,)](bits, key, B, T, G, threshold, BLOCK, enable_fp_fusion=True)
    return bits
