"""Write new keys and values to their slots of a cache, in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gpu import HAS_TRITON, NAMESPACE

if HAS_TRITON:
    from . import write_kernel


def write(
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    pages: Tensor | None,
    new_k: Tensor,
    new_v: Tensor,
    cu_seqlens: Tensor | None,
) -> None:
    """`Cache.write` of new_k and new_v for a cache's k, v, lengths and pages; on a GPU by a kernel, without waiting."""
    if HAS_TRITON and k.device.type == "cuda" and not torch.version.hip:
        write_kernel.write(k, v, lengths, pages, new_k, new_v, cu_seqlens)
        return
    sequence, position = destinations(lengths, new_k, cu_seqlens)
    size = k.shape[2]
    capacity = size if pages is None else size * pages.shape[1]
    has_slot = (position >= 0) & (position < capacity)
    row, slot = sequence, position
    if pages is not None:
        row, slot = pages[sequence, position.clamp(0, capacity - 1) // size], position % size
        has_slot &= row >= 0
    for x, new in ((k, new_k), (v, new_v)):
        x[row[has_slot], :, slot[has_slot]] = new.transpose(1, 2).flatten(0, 1)[has_slot]  # (tokens, H_kv, D)


# For torch.compile only: elsewhere torch's dispatcher would take longer than the kernel.
cache_write = torch.library.custom_op(f"{NAMESPACE}::cache_write", write, mutates_args=("k", "v"))


@cache_write.register_fake
def _(k: Tensor, v: Tensor, *_: Any) -> None:
    if k.storage_offset() or v.storage_offset():
        raise ValueError(
            "torch.compile (2.11) writes to the wrong place of a view; allocate a cache's k and v separately, or write "
            "outside the compiled function."
        )


def destinations(lengths: Tensor, new_k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sequence and the position in it of each new token, in the order in which they lie: (tokens,) each."""
    tokens = torch.arange(new_k.shape[0] * new_k.shape[2], device=lengths.device)
    if cu_seqlens is None:
        T = new_k.shape[2]
        sequence, until_end = tokens // T, T - tokens % T
    else:
        ends = cu_seqlens[1:]
        sequence = torch.searchsorted(ends, tokens.to(ends.dtype), right=True).clamp(max=lengths.shape[0] - 1)
        until_end = ends[sequence] - tokens
    return sequence, lengths[sequence] - until_end
