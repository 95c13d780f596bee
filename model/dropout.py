"""Dropout of the residual stream, from the same counters as attention's: the same mask on every device and rank.

The model drops from the stream at several sites. An element (sequence, position t, channel c) of a site is addressed
like an element of attention's mask: t is the row, c the column, the site the head, and the layer is one above any
model's:

    keep_mask(key.at_layer(LAYER), p, B, n_sites, T, C)        # attention/dropout

The masks of all sites are drawn at once, as bits. A compiled step keeps the bits for the backward pass, an eighth of
the bytes of torch's masks, whatever it recomputes. Column c of a row is bit b of byte g, so that the bits of one
generator call lie side by side:

    g = (c >> 6) * 8 + (c & 7),      b = (c >> 3) & 7
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attention.dropout import DropoutKey, drop_threshold, keep_mask, keep_scale
from attention.gpu import HAS_TRITON

LAYER = 2**16 - 1


class Mask(NamedTuple):
    """The dropout mask of one site, and how to apply it."""

    bits: Tensor  # (B, T, ceil(C / 64) * 8) uint8
    shifts: Tensor  # (8, 1), to extract the bits
    scale: float  # factor of the kept elements


def draw_masks(
    key: DropoutKey,
    p: float,
    n_sites: int,
    B: int,
    T: int,
    C: int,
    device: torch.device,
    rows: tuple[tuple[int, int], ...] | None = None,
) -> list[Mask]:
    """The masks of all sites, for `drop`.

    rows  the positions of the T tokens: ranges that start at multiples of 16; None: from key.first_query on
    """
    key = replace(key, layer=LAYER, first_head=0, first_key=0)  # every rank has all sites and channels
    parts = [(key, T)] if rows is None else [(replace(key, first_query=start), stop - start) for start, stop in rows]
    drawn = [draw_bits(part.pack(device), p, n_sites, B, length, C) for part, length in parts]
    bits = drawn[0] if len(drawn) == 1 else torch.cat(drawn, dim=2)
    # Each site has separate shifts: if sites shared them, the compiler would store the unpacked masks.
    shifts = torch.arange(8, dtype=torch.uint8, device=device)[:, None].expand(n_sites, 8, 1)
    return [Mask(bits[site], shifts[site], keep_scale(p)) for site in range(n_sites)]


def drop(x: Tensor, mask: Mask | None) -> Tensor:
    """x (B, T, C) with the dropped elements 0 and the others scaled up; without a mask, x."""
    if mask is None:
        return x
    return torch.where(keep_bits(mask.bits, mask.shifts, x.shape[-1]), x * mask.scale, 0)


def keep_bits(bits: Tensor, shifts: Tensor, C: int) -> Tensor:
    """(B, T, C) of a Mask's bits and shifts: whether an element is kept."""
    return (bits.unflatten(-1, (-1, 1, 8)) >> shifts & 1).flatten(-3)[..., :C] != 0


@torch.library.custom_op("gpt::draw_bits", mutates_args=())
def draw_bits(key: Tensor, p: float, n_sites: int, B: int, T: int, C: int) -> Tensor:
    """The bits of all sites, (n_sites, B, T, ceil(C / 64) * 8) uint8, for a packed key and on its device."""
    if key.is_cuda and HAS_TRITON:
        from model.dropout_kernel import launch_draw_bits

        return launch_draw_bits(key, drop_threshold(p), n_sites, B, T, C)
    unpacked = DropoutKey(*key)
    shifts = torch.arange(8, dtype=torch.uint8, device=key.device)[:, None]
    sequences = []
    for i in range(B):  # one at a time: each call of the generator needs a hundred bytes of workspace
        key_i = replace(unpacked, first_sequence=unpacked.first_sequence + i)
        keep = keep_mask(key_i, p, 1, n_sites, T, -(-C // 64) * 64, device=key.device)[0]
        bits = (keep.unflatten(-1, (-1, 8, 8)).to(torch.uint8) << shifts).sum(-2, dtype=torch.uint8)
        sequences.append(bits.flatten(-2))
    return torch.stack(sequences, dim=1)


draw_bits.register_fake(
    lambda key, _, n_sites, B, T, C: key.new_empty(n_sites, B, T, -(-C // 64) * 8, dtype=torch.uint8)
)
