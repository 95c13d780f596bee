"""Dropout of the residual stream, from the same counters as attention's: one mask wherever and however it is drawn.

A place in the stream (sequence, position t, channel c) that dropout visits at several sites of the model is addressed
like a row, a column and a head of attention's mask, in a layer that no model has:

    keep_mask(key.at_layer(LAYER), p, B, n_sites, T, C)        # attention/dropout.py

The masks of all sites are drawn at once and kept for the backward pass as bits, an eighth of torch's bytes. Column c of
a row is bit b of byte g, those of one call of the generator side by side:

    g = (c >> 6) * 8 + (c & 7),      b = (c >> 3) & 7
"""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dropout import DropoutKey, drop_threshold, keep_mask, keep_scale

LAYER = 2**16 - 1


def draw_masks(key: DropoutKey, p: float, n_sites: int, B: int, T: int, C: int, device: torch.device) -> Tensor:
    """What `drop` keeps at each site, as bits: (n_sites, B, T, ceil(C / 64) * 8) uint8."""
    return draw_bits(key.at_layer(LAYER).pack(device), p, n_sites, B, T, C)


def drop(x: Tensor, bits: Tensor | None, p: float) -> Tensor:
    """x (B, T, C) with 0 where its site's mask has a clear bit and the rest scaled up for it; without a mask, x."""
    if bits is None:
        return x
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)[:, None]
    keep = (bits.unflatten(-1, (-1, 1, 8)) >> shifts & 1).flatten(-3)[..., : x.shape[-1]]  # (B, T, C)
    return torch.where(keep != 0, x * keep_scale(p), 0)


@torch.library.custom_op("gpt::draw_bits", mutates_args=())
def draw_bits(key: Tensor, p: float, n_sites: int, B: int, T: int, C: int) -> Tensor:
    """`draw_masks`, of a packed key, on the key's device."""
    if key.is_cuda:
        from model.dropout_kernel import launch_draw_bits  # Triton is there where CUDA is

        return launch_draw_bits(key, drop_threshold(p), n_sites, B, T, C)
    keep = keep_mask(DropoutKey(*key), p, B, n_sites, T, -(-C // 64) * 64)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    bits = (keep.unflatten(-1, (-1, 8, 8)).to(torch.uint8) << shifts).sum(-2, dtype=torch.uint8)
    return bits.flatten(-2).transpose(0, 1).contiguous()


@draw_bits.register_fake
def _(key: Tensor, p: float, n_sites: int, B: int, T: int, C: int) -> Tensor:
    return key.new_empty(n_sites, B, T, -(-C // 64) * 8, dtype=torch.uint8)
