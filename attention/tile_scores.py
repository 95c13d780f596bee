"""The tiles that attention=tiled visits, and the masks and changes of the scores in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .formula.call import tile_formula
from .formula.evaluate import run
from .formula.tile import Tile
from .layout import Layout
from .score import Range, Score, key_intervals
from .spec import Inputs, Spec


class TileScores:
    """The tiles to visit, and the scores of one."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        inputs: Inputs,
        spec: Spec,
        q_start: int | None,
        k_start: int,
        lengths: Tensor | None = None,
    ) -> None:
        """q (B, H, T, D) and k (B, H_kv, S, D); q_start, k_start and lengths as in Layout."""
        self.T, self.S, self.spec = q.shape[2], k.shape[2], spec
        self.layout = Layout(q_start, k_start, inputs.starts, inputs.ends, lengths)
        self.seen = key_intervals(spec.score, self.layout, self.T, self.S, q.device)
        self.formula = tile_formula(spec.score, self.layout, inputs.formula or (), self.T, self.S, q.device)
        # Python decides which tiles to visit. On a GPU it would have to wait for bounds of documents and for lengths,
        # which a CUDA graph cannot: there tiles of other documents are visited, and masked whole, and all tiles of a
        # cache.
        self.on_host = all(x is None or x.device.type == "cpu" for x in (inputs.starts, lengths))
        score = spec.score if self.on_host or lengths is None else Score(causal=False)
        layout = self.layout if self.on_host else Layout(q_start, k_start)
        self.to_visit = key_intervals(score, layout, self.T, self.S, "cpu")

    def key_tiles(self, rows: Range) -> Iterator[Range]:
        """The tiles of keys that the rows see."""
        end = self.to_visit.end[..., slice(*rows)]
        for columns in tiles(0, int(end.amax()) if end.numel() else 0, self.spec.block_k):
            if self.to_visit.meet(rows, columns):
                yield columns

    def query_tiles(self, columns: Range) -> Iterator[Range]:
        """The tiles of queries that see one of the columns."""
        for rows in tiles(0, self.T, self.spec.block_q):
            if self.to_visit.meet(rows, columns):
                yield rows

    def change(self, b_s: Tensor, rows: Range, columns: Range) -> Tensor:
        """A tile of scaled scores (B, H_kv, G, block_q, block_k), changed; -inf where a query does not see a key."""
        if self.formula is not None:
            b_s = self.formula.value(b_s.flatten(1, 2), rows, columns).view(b_s.shape)
        return hide(b_s, self.hidden(rows, columns), -torch.inf)

    def change_with_gradients(self, b_s: Tensor, rows: Range, columns: Range) -> tuple[Tensor, TileGradients]:
        """`change`, and an object that takes a tile's gradient back to the formula's inputs."""
        tile, slopes = None, [1.0]
        if self.formula is not None:
            tile = Tile(self.formula, b_s.flatten(1, 2), rows, columns)
            value, *slopes = run(self.formula.steps.gradients, tile.values)
            b_s = value.view(b_s.shape)
        hidden = self.hidden(rows, columns)
        return hide(b_s, hidden, -torch.inf), TileGradients(tile, slopes, hidden)

    def hidden(self, rows: Range, columns: Range) -> Tensor | None:
        """True where a query does not see a key, to broadcast over a tile; None where all see all."""
        if self.on_host and self.to_visit.cover(rows, columns):
            return None
        mask = self.seen.mask(rows, columns)
        return None if mask is None else over_groups(~mask)

    def fully_masked(self, rows: Range) -> Tensor | None:
        """The rows that see nothing, to broadcast over a tile; None where there cannot be any."""
        return None if self.seen.never_empty else over_groups(self.seen.fully_masked(rows))


class TileGradients:
    """The derivatives of a tile's scores by s and by the other inputs of a formula."""

    def __init__(self, tile: Tile | None, slopes: list[Any], hidden: Tensor | None) -> None:
        """slopes: by s, then by each input of the formula: tensors, or numbers where they are the same everywhere."""
        self.tile, self.slopes, self.hidden = tile, slopes, hidden

    def back(self, b_ds: Tensor) -> Tensor:
        """The gradient of the scaled scores, from the changed scores'; sums the gradients of a formula's inputs."""
        if self.tile is not None and self.tile.formula.sums:
            learned = self.tile.formula.sums
            self.tile.add_to_sums({k: self.times(b_ds, self.slopes[k + 1]).flatten(1, 2) for k in learned})
        return self.times(b_ds, self.slopes[0])

    def times(self, b_ds: Tensor, slope: Any) -> Tensor:
        """b_ds times a derivative, which may have no value where a query does not see a key."""
        if not isinstance(slope, Tensor):
            return b_ds if slope == 1 else b_ds * slope
        flat = b_ds.flatten(1, 2) * slope
        return hide(flat.view(b_ds.shape), self.hidden, 0.0)


def hide(b_x: Tensor, hidden: Tensor | None, value: float) -> Tensor:
    """A tile with `value` in place of hidden scores."""
    return b_x if hidden is None else b_x.masked_fill_(hidden, value)


def tiles(start: int, stop: int, block: int) -> Iterator[Range]:
    """(start, stop) of each tile; the last may be shorter."""
    for i in range(start, stop, block):
        yield i, min(i + block, stop)


def over_groups(mask: Tensor) -> Tensor:
    """A mask of (rows, columns) or (B, 1, rows, columns), to broadcast over (B, H_kv, G, rows, columns)."""
    return mask.unsqueeze(1) if mask.ndim == 4 else mask
