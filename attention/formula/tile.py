"""The scores of a tile by a formula, and the gradients of the formula's inputs, in torch."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .evaluate import ProgramInputs, entries, full_index, run, sum_of_entries
from .hoist import Steps

Range = tuple[int, int]


class TileFormula:
    """A call's formula, for tiles of its scores.

    i         (T,) or (B, T)   positions of the queries
    j         (S,)             positions of the keys
    visible   the lowest and the highest i - j of queries and keys that can see each other
    inputs    the tensors in the formula besides s: hoisted values, then tables as they were given
    """

    def __init__(self, steps: Steps, inputs: Sequence[Tensor], i: Tensor, j: Tensor, visible: Range) -> None:
        self.steps, self.i, self.j, self.visible = steps, i, j, visible
        self.hoisted, self.tables = inputs[: len(steps.hoisted)], inputs[len(steps.hoisted) :]
        self.sums: dict[int, Tensor] = {}

    def value(self, s: Tensor, rows: Range, columns: Range) -> Tensor:
        """The scores of a tile, (B, H, rows, columns), of its scaled scores s."""
        return run(self.steps.value, Tile(self, s, rows, columns).values)[0]

    def start_sums(self, numbers: Collection[int]) -> None:
        """Begin the sums of the gradients of inputs, by their indices. `Tile.add_to_sums` adds a tile's gradients."""
        for k in numbers:
            x = (*self.hoisted, *self.tables)[k]
            many = k >= len(self.hoisted) or self.steps.hoisted[k][0] in ("head", "distance")
            self.sums[k] = torch.zeros(x.shape, dtype=torch.float64 if many else x.dtype, device=x.device)

    def gradients(self) -> list[Tensor]:
        """The sums, in the dtypes of their inputs."""
        inputs = (*self.hoisted, *self.tables)
        return [total.to(inputs[k].dtype) for k, total in self.sums.items()]


class Tile:
    """One tile of the scores of a `TileFormula`, (B, H, rows, columns).

    i, j  positions that broadcast over the tile. For a key that a query cannot see, j is the nearest key that it can
          see, so that all scores have a value, as log(i - j + 1) has not above the diagonal
    """

    def __init__(self, formula: TileFormula, s: Tensor, rows: Range, columns: Range) -> None:
        """s: the scaled scores."""
        self.formula, self.rows, self.columns = formula, slice(*rows), slice(*columns)
        leaves = {"s": s}
        if formula.steps.by_position:
            i, j = formula.i[..., self.rows, None], formula.j[self.columns]
            j = torch.minimum(torch.maximum(j, i - formula.visible[1]), i - formula.visible[0])
            if i.ndim == 3:
                i, j = i.unsqueeze(1), j.unsqueeze(1)  # (B, 1, rows, ...)
            b, h = (torch.arange(size, device=s.device) for size in s.shape[:2])
            leaves |= {"i": i, "j": j, "h": h.view(-1, 1, 1), "b": b.view(-1, 1, 1, 1)}
        self.values = ProgramInputs(leaves, s.dtype, [], [])
        for (stage, *_), x in zip(formula.steps.hoisted, formula.hoisted, strict=True):
            self.values.hoisted.append(self.cut(x, stage))
        self.indices = [
            full_index(x, run(steps, self.values), leaves["b"])
            for (_, steps), x in zip(formula.steps.tables, formula.tables, strict=True)
        ]
        for x, index in zip(formula.tables, self.indices, strict=True):
            self.values.tables.append(entries(x.to(s.dtype), index))

    def cut(self, x: Tensor, stage: str) -> Tensor:
        """The tile's part of hoisted values, in a shape that broadcasts over the tile."""
        match stage:
            case "head":
                return x.unsqueeze(-1)
            case "row":
                return x[..., self.rows].unsqueeze(-1)
            case "column":
                return x[..., self.columns].unsqueeze(-2)
            case "pair":
                return x[..., self.rows, self.columns]
        return entries(x, self.distance_index(x))

    def distance_index(self, x: Tensor) -> list[Tensor]:
        """The index of the tile's entries in a hoisted vector of distances, (B or 1, H or 1, length)."""
        b, h = (torch.arange(size, device=x.device) for size in x.shape[:2])
        d = self.values.leaves["i"] - self.values.leaves["j"] - self.formula.visible[0]
        return [b.view(-1, 1, 1, 1), h.view(-1, 1, 1), d.clamp(max=x.shape[2] - 1)]

    def add_to_sums(self, terms: dict[int, Tensor]) -> None:
        """Add the tile's gradients of inputs, {index of the input: (B, H, rows, columns)}, to the sums."""
        count = len(self.formula.hoisted)
        for k, x in terms.items():
            total = self.formula.sums[k]
            if k >= count:
                total += sum_of_entries(x, self.indices[k - count], total.shape)
                continue
            for axis in (0, 1):
                x = x.sum(axis, keepdim=True) if total.shape[axis] == 1 else x
            match self.formula.steps.hoisted[k][0]:
                case "head":
                    total += x.sum((2, 3), dtype=total.dtype).unsqueeze(-1)
                case "row":
                    total[..., self.rows] += x.sum(3)
                case "column":
                    total[..., self.columns] += x.sum(2)
                case "pair":
                    total[..., self.rows, self.columns] += x
                case "distance":
                    total += sum_of_entries(x, self.distance_index(total), total.shape)
