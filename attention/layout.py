"""The positions of queries and keys, and the documents that they belong to: tensors of a batch."""

from typing import NamedTuple

import torch
from torch import Tensor

from .errors import Option, ScoreError


class Layout(NamedTuple):
    """The positions of a call's queries and keys in their rows, and the bounds of the rows' documents.

    q_start          position of the first query; None: the last query stands at the last key's position
    k_start          position of the first key
    document_starts  (B, L) int32, for each position of a row the start of its document; None: one document
    document_ends    (B, L) int32, one past the document's last position
    lengths          (B,) int32: of the S keys, those that each sequence has, its queries standing at the last of them;
                     for caches. None: S. Not to be combined with the other fields

    The shapes do not depend on the number of documents, so new documents neither cause recompilation nor invalidate a
    CUDA graph. A kernel finds the bounds of a tile of queries in its first and last entries.
    """

    q_start: int | None = None
    k_start: int = 0
    document_starts: Tensor | None = None
    document_ends: Tensor | None = None
    lengths: Tensor | None = None

    def query_start(self, T: int, S: int) -> int:
        """Position of the first of T queries that attend to S keys."""
        return self.k_start + S - T if self.q_start is None else self.q_start

    def own_keys(self, T: int, S: int, device: torch.device | str) -> Tensor:
        """For each of T queries the index of the key at its own position: (T,), or with lengths (B, T)."""
        if self.lengths is not None:
            return self.lengths[:, None] - T + torch.arange(T, device=device)
        offset = self.query_start(T, S) - self.k_start
        return torch.arange(offset, offset + T, device=device)

    def features(self) -> dict[str, Option]:
        """The features beyond one document with default positions: name -> the option that needs it."""
        asked = {
            "documents": self.document_starts is not None,
            "lengths": self.lengths is not None,
            "offsets": self.offsets(),
        }
        return {name: Option(f"layout.{name}") for name, is_asked in asked.items() if is_asked}

    def offsets(self) -> bool:
        """Whether the caller gives positions other than the default ones."""
        return self.q_start is not None or self.k_start != 0


def documents(starts: Tensor) -> Layout:
    """The layout of rows whose token t belongs to the document that begins at starts[b, t]: (B, L) int32.

    Runs on the tensor's device without waiting for it.
    """
    return Layout(document_starts=starts, document_ends=torch.searchsorted(starts, starts, right=True, out_int32=True))


def packed(cu_seqlens: Tensor, length: int) -> Layout:
    """The layout of one row of `length` tokens in which documents lie side by side.

    cu_seqlens  (n + 1,) integers, where each document begins and, last, the row's length, as in flash-attn's varlen.
                Two equal ones are an empty document.

    Reads the values, so it waits for the device. Raises ScoreError.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        shape, dtype = tuple(cu_seqlens.shape), cu_seqlens.dtype
        raise ScoreError(f"cu_seqlens of shape {shape} and {dtype} must be a 1-D tensor of integers.")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        raise ScoreError(
            f"cu_seqlens={shown(bounds)} must start at 0, never decrease and end at the row's length, {length}."
        )
    cu_seqlens = cu_seqlens.to(torch.int32)
    positions = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    following = torch.searchsorted(cu_seqlens, positions, right=True)
    return Layout(document_starts=cu_seqlens[following - 1][None], document_ends=cu_seqlens[following][None])


def shown(bounds: list[int]) -> str:
    """A list for an error message, its middle left out."""
    return str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
