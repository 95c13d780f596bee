"""Slow memory: tensors that are read and written tile by tile, and the count of what moves.

A GPU's memory is slow (HBM) and its registers and shared memory are fast (SRAM). The functions of this package hold
their inputs and results in `Slow` tensors. A tile that they `load` stays in fast memory until its name is reused.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Rows = slice


@dataclass
class Traffic:
    """Numbers moved between slow and fast memory."""

    read: int = 0
    written: int = 0

    @property
    def total(self) -> int:
        """Both ways."""
        return self.read + self.written


class Slow:
    """A tensor in slow memory, cut along its first dimension.

    on_move  called with (this tensor, its rows, "load" or "store") at every move
    """

    def __init__(self, tensor: Tensor, traffic: Traffic) -> None:
        self.tensor, self.traffic = tensor, traffic
        self.on_move: Callable[[Slow, Rows, str], None] | None = None

    def __len__(self) -> int:
        return len(self.tensor)

    def load(self, rows: Rows) -> Tensor:
        """A copy of some rows in fast memory."""
        tile = self.tensor[rows].clone()
        self.traffic.read += tile.numel()
        if self.on_move:
            self.on_move(self, rows, "load")
        return tile

    def store(self, rows: Rows, tile: Tensor) -> None:
        """Write some rows back."""
        self.tensor[rows] = tile
        self.traffic.written += tile.numel()
        if self.on_move:
            self.on_move(self, rows, "store")


class SlowMemory(dict[str, Slow]):
    """All tensors in slow memory by name: `hbm.Q` is `hbm["Q"]`."""

    def __getattr__(self, name: str) -> Slow:
        return self[name]


def tiles(length: int, block: int) -> list[Rows]:
    """The rows of each tile; the last may be shorter."""
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]
