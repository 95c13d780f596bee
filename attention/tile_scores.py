"""The tiles that attention=tiled visits, and the masks and changes of the scores in one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .score import Layout, Range, change_scores, key_intervals
from .spec import Inputs, Spec


class TileScores:
    """Which tiles there are to visit, and the scores of one."""

    def __init__(self, q: Tensor, k: Tensor, inputs: Inputs, spec: Spec, q_start: int | None, k_start: int) -> None:
        """q (B, H, T, D) and k (B, H_kv, S, D); q_start and k_start as Layout has them."""
        self.T, self.S, self.spec = q.shape[2], k.shape[2], spec
        self.layout = Layout(q_start, k_start, inputs.starts, inputs.ends)
        self.slopes = None if inputs.slopes is None else inputs.slopes.view(k.shape[1], -1, 1, 1)  # (H_kv, G, 1, 1)
        self.seen = key_intervals(spec.score, self.layout, self.T, self.S, q.device)
        # Python decides which tiles to visit. On a GPU it would have to wait for the documents' bounds, which a CUDA
        # graph cannot: there tiles of other documents are visited, and masked whole.
        self.host_knows_all = inputs.starts is None or inputs.starts.device.type == "cpu"
        known = self.layout if self.host_knows_all else self.layout._replace(document_starts=None, document_ends=None)
        self.known = key_intervals(spec.score, known, self.T, self.S, "cpu")

    def key_tiles(self, rows: Range) -> Iterator[Range]:
        """The tiles of keys that the rows see."""
        end = self.known.end[..., slice(*rows)]
        for columns in tiles(0, int(end.amax()) if end.numel() else 0, self.spec.block_k):
            if self.known.meet(rows, columns):
                yield columns

    def query_tiles(self, columns: Range) -> Iterator[Range]:
        """The tiles of queries that see one of the columns."""
        for rows in tiles(0, self.T, self.spec.block_q):
            if self.known.meet(rows, columns):
                yield rows

    def change(self, b_s: Tensor, rows: Range, columns: Range) -> Tensor:
        """A tile of scaled scores (B, H_kv, G, block_q, block_k), changed; -inf where a query does not see a key."""
        b_s = change_scores(b_s, self.spec.score, self.layout, self.slopes, rows, columns, self.T, self.S)
        if not (self.host_knows_all and self.known.cover(rows, columns)):
            mask = self.seen.mask(rows, columns)
            if mask is not None:
                b_s = b_s.masked_fill_(~over_groups(mask), -torch.inf)
        return b_s

    def fully_masked(self, rows: Range) -> Tensor | None:
        """The rows that see nothing, to broadcast over a tile; None where there cannot be any."""
        return None if self.seen.never_empty else over_groups(self.seen.fully_masked(rows))


def tiles(start: int, stop: int, block: int) -> Iterator[Range]:
    """(start, stop) of each tile; the last may be shorter."""
    for i in range(start, stop, block):
        yield i, min(i + block, stop)


def over_groups(mask: Tensor) -> Tensor:
    """A mask of (rows, columns) or (B, 1, rows, columns), to broadcast over (B, H_kv, G, rows, columns)."""
    return mask.unsqueeze(1) if mask.ndim == 4 else mask
