"""One layer's keys and values of the tokens so far, for a batch of sequences of different lengths.

The tensors belong to the caller and attention stays stateless: a Cache is a view of them for one call. Its shapes do
not depend on the lengths, so a CUDA graph that was captured once serves every further token.

>>> cache = Cache(k, v, lengths)                # k, v (B, H_kv, L, D); lengths (B,) counts the new tokens already
>>> cache = Cache(k, v, lengths, pages)         # k, v (P, H_kv, page, D); pages (B, n), as in vLLM (Kwon et al. 2023)
>>> cache.write(new_k, new_v)                   # (B, H_kv, T, D)
>>> out = attend.decode(q, cache).out           # (B, H, T, D)
"""

from typing import Any, NamedTuple

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


PAGE_SIZES = (16, 32, 64, 128, 256)


class Cache(NamedTuple):
    """Keys and values of a batch of sequences; position t of a sequence is slot t of its row or of its pages.

    k, v     (B, H_kv, L, D), or paged (P, H_kv, page, D): P pages of 16, 32, 64, 128 or 256 slots
    lengths  (B,) int32, on the same device: the tokens of each sequence, new ones included. 0: no sequence here
    pages    (B, n) int32: page pages[b, i] holds sequence b's tokens from i * page on. Entries of pages that no query
             sees (behind the length, before the window) are never followed and may be -1. None: contiguous

    The values of lengths and pages are not checked, which would wait for the device: a length beyond the capacity drops
    the tokens that have no slot, and a page number of P or more reads and writes memory outside the cache.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    pages: Tensor | None = None

    @property
    def capacity(self) -> int:
        """The most tokens a sequence can have."""
        return self.k.shape[2] * (1 if self.pages is None else self.pages.shape[1])

    def write(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None) -> None:
        """Write the keys and values of the last tokens of each sequence into their slots.

        k, v        (B, H_kv, T, D): row t of sequence b is its token lengths[b] - T + t. Tokens before a sequence's
                    first are dropped. With cu_seqlens (1, H_kv, total, D), the sequences one after the other
        cu_seqlens  (B + 1,) integers on the cache's device: the start of each sequence in the row and, last, the
                    end of the last one. Tokens behind it belong to none; they may overwrite slots behind that one's

        Does not wait for the device. Raises ValueError for tensors that do not fit the cache. Under torch.compile, the
        cache's k and v must not be views into a larger tensor.
        """
        self.check()
        (_, H_kv, _, D), B = self.k.shape, self.lengths.shape[0]
        rows = 1 if cu_seqlens is not None else B
        if k.shape != v.shape or k.ndim != 4 or k.shape != (rows, H_kv, k.shape[2], D):
            raise ValueError(
                f"A cache of {tuple(self.k.shape)} for {B} sequences takes k and v ({rows}, {H_kv}, tokens, {D}); got "
                f"{tuple(k.shape)} and {tuple(v.shape)}."
            )
        if not (k.dtype == v.dtype == self.k.dtype and k.device == v.device == self.k.device):
            raise ValueError(
                f"New keys and values must be {self.k.dtype} on {self.k.device} as the cache is; got {k.dtype} on "
                f"{k.device} and {v.dtype} on {v.device}."
            )
        if cu_seqlens is not None and cu_seqlens.shape != (B + 1,):
            raise ValueError(f"cu_seqlens of shape {tuple(cu_seqlens.shape)} must be ({B + 1},) for {B} sequences.")
        put = cache_write if torch.compiler.is_compiling() else write
        put(self.k, self.v, self.lengths, self.pages, k, v, cu_seqlens)

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The keys and values of the positions from start up to, but not including, stop: (B, H_kv, n, D).

        Zeros stand where a sequence has no token, whatever the memory holds there.
        """
        positions = torch.arange(start, stop, device=self.k.device)
        filled = positions < self.lengths[:, None]  # (B, n)
        if self.pages is None:
            k, v = self.k[:, :, start:stop], self.v[:, :, start:stop]
        else:
            size = self.k.shape[2]
            pages = self.pages[:, positions // size]  # (B, n)
            filled &= pages >= 0
            at = (pages.clamp(min=0), slice(None), positions % size)
            k, v = self.k[at].transpose(1, 2), self.v[at].transpose(1, 2)
        if host_sees(filled) and filled.all():
            return k, v
        empty = ~filled[:, None, :, None]
        return k.masked_fill(empty, 0.0), v.masked_fill(empty, 0.0)

    def longest(self) -> int:
        """The length of the longest sequence or, where reading it would wait for a device, the capacity."""
        return min(int(self.lengths.max()), self.capacity) if host_sees(self.lengths) else self.capacity

    def check(self) -> None:
        """Raise ValueError unless the tensors have the shapes and dtypes that the class describes."""
        k, v, lengths, pages = self
        if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
            raise ValueError(
                f"A cache's k and v are both (B, H_kv, L, D) or (P, H_kv, page, D); got {tuple(k.shape)} {k.dtype} and "
                f"{tuple(v.shape)} {v.dtype}."
            )
        if any(x is not None and x.shape[-1] > 1 and x.stride(-1) != 1 for x in self):
            raise ValueError("A cache's tensors must be contiguous in their last dimension.")
        if lengths.ndim != 1 or lengths.dtype != torch.int32 or lengths.shape[0] == 0:
            raise ValueError(f"A cache's lengths are (B,) int32; got {tuple(lengths.shape)} {lengths.dtype}.")
        B = lengths.shape[0]
        if pages is None and k.shape[0] != B:
            raise ValueError(f"A contiguous cache of {k.shape[0]} rows has {B} lengths; pass pages if it is paged.")
        if pages is not None:
            if pages.ndim != 2 or pages.dtype != torch.int32 or pages.shape[0] != B:
                raise ValueError(f"pages must be ({B}, n) int32, as lengths; got {tuple(pages.shape)} {pages.dtype}.")
            if k.shape[2] not in PAGE_SIZES:
                raise ValueError(
                    f"A page holds {', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]} tokens, not {k.shape[2]}."
                )


def host_sees(x: Tensor) -> bool:
    """Whether Python may read values of x: without waiting for a device, and without breaking a compiled graph."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
