"""`Cache.write` in Triton: one launch, which finds out on the device which tokens have a slot."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class CacheRows(NamedTuple):
    """A tensor (places, heads, slots, D) with a contiguous last dimension."""

    pointer: Tensor
    stride_place: int
    stride_h: int
    stride_slot: int
    D: int


@triton.jit(do_not_specialize=["T", "H_kv", "B", "capacity", "n_pages"])
def write_kernel(
    k, v, new_k, new_v, lengths, pages, cu_seqlens, T, H_kv, B, capacity, n_pages,
    PAGE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """One new token. Grid: new rows x T.

    HEADS, COLUMNS, SEQUENCES  H_kv, D and B, rounded up to powers of two; B where there are cu_seqlens
    """
    i_row, i_t = tl.program_id(0) // T, tl.program_id(0) % T
    if cu_seqlens is None:
        i_b = i_row
        position = tl.load(lengths + i_b) - T + i_t
    else:  # empty sequences end where others do: the token's sequence is the first that ends behind it
        o_b = tl.arange(0, SEQUENCES)
        b_end = tl.load(cu_seqlens + 1 + o_b, mask=o_b < B, other=T + 1)
        i_b = tl.minimum(tl.sum((b_end <= i_t).to(tl.int32), 0), B - 1)
        position = tl.load(lengths + i_b) - tl.load(cu_seqlens + 1 + i_b).to(tl.int32) + i_t
    if (position < 0) | (position >= capacity):
        return
    if PAGE is None:
        i_place, slot = i_b, position
    else:
        i_place, slot = tl.load(pages + tl.cast(i_b, tl.int64) * n_pages + position // PAGE), position % PAGE
        if i_place < 0:
            return
    move(new_k, k, i_row, i_t, i_place, slot, H_kv, HEADS, COLUMNS)
    move(new_v, v, i_row, i_t, i_place, slot, H_kv, HEADS, COLUMNS)


@triton.jit
def move(source, target, i_row, i_t, i_place, slot, H_kv, HEADS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row i_t of source's i_row, all heads of it, to the slot of target's i_place."""
    o_h, o_d = tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, COLUMNS)[None, :]
    inside = (o_h < H_kv) & (o_d < source.D)
    p_source = (
        source.pointer + tl.cast(i_row, tl.int64) * source.stride_place + tl.cast(i_t, tl.int64) * source.stride_slot
    )
    p_target = (
        target.pointer + tl.cast(i_place, tl.int64) * target.stride_place + tl.cast(slot, tl.int64) * target.stride_slot
    )
    b_x = tl.load(p_source + o_h * source.stride_h + o_d, mask=inside)
    tl.store(p_target + o_h * target.stride_h + o_d, b_x, mask=inside)


def write(
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    pages: Tensor | None,
    new_k: Tensor,
    new_v: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """`write` of cache.py by a kernel; does not wait for the device."""
    (rows, H_kv, T, D), B = new_k.shape, lengths.shape[0]
    if new_k.numel() == 0:
        return
    new_k, new_v = (x if x.stride(-1) == 1 else x.contiguous() for x in (new_k, new_v))
    with torch.cuda.device_of(k):
        write_kernel[(rows * T,)](
            *(CacheRows(x, x.stride(0), x.stride(1), x.stride(2), D) for x in (k, v, new_k, new_v)),
            lengths,
            pages,
            cu_seqlens,
            T,
            H_kv,
            B,
            k.shape[2] * (1 if pages is None else pages.shape[1]),
            None if pages is None else pages.stride(0),
            PAGE=None if pages is None else k.shape[2],
            HEADS=triton.next_power_of_2(H_kv),
            COLUMNS=triton.next_power_of_2(D),
            SEQUENCES=None if cu_seqlens is None else triton.next_power_of_2(B),
            num_warps=4,
            enable_fp_fusion=True,
        )
