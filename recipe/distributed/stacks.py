"""Matrices of one shape in stacks, on which a function works at once, where each rank may have only some of their rows.

Where FSDP2 shards the matrices, each rank works on other stacks: it receives their rows from all ranks, and sends every
rank its rows of the result. A stack has the same matrices on any number of ranks, so its results have the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Stacks:
    """The parts of some matrices in stacks.

    shapes  of each part as a whole
    stacks  the parts in each stack, as indices
    """

    def __init__(self, matrices: Sequence[tuple[Tensor, Sequence[int]]], most: int) -> None:
        """
        matrices  whole, or sharded by rows over all ranks; each with the row counts of the parts that it consists of
        most      elements in a stack of several parts
        """
        mesh = matrices[0][0].device_mesh if isinstance(matrices[0][0], DTensor) else None
        self.ranks, self.rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.shapes = [torch.Size((n, matrix.shape[1])) for matrix, counts in matrices for n in counts]
        self.stacks = stacks(self.shapes, most)
        # For each matrix and part the first row and the one after the last that this rank has, counted from its first.
        self.bounds: list[list[tuple[int, int]]] = []
        self.sizes: list[list[int]] = []  # of each part the elements of each rank
        for matrix, counts in matrices:
            each, end = -(-len(matrix) // self.ranks), 0
            self.bounds.append([])
            for count in counts:
                start, end = end, end + count
                # FSDP2 cuts rows like torch.chunk.
                cuts = [min(max(start, rank * each), end) for rank in range(self.ranks + 1)]
                self.sizes.append([(b - a) * matrix.shape[1] for a, b in pairwise(cuts)])
                first = self.rank * each
                self.bounds[-1].append((cuts[self.rank] - first, cuts[self.rank + 1] - first))

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of each part, views of what it has of tensors shaped like the matrices."""
        return [x[a:b] for x, bounds in zip(tensors, self.bounds, strict=True) for a, b in bounds]

    def apply(
        self, function: Callable[[Tensor], Tensor], parts: Sequence[Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[list[int], Tensor]]:
        """function of every stack of the parts, rounded to dtype: (parts, rows, columns) in, and the same shape out.

        Yields a stack with this rank's rows of the result, one part after the other. All ranks call this together.
        """
        for first in range(0, len(self.stacks), self.ranks):
            taken = self.stacks[first : first + self.ranks]  # by a rank each
            rows = [parts[i] for stack in taken for i in stack]
            sent = torch.empty(sum(x.numel() for x in rows), dtype=dtype, device=rows[0].device)
            pieces = sent.split([x.numel() for x in rows])
            torch._foreach_copy_([piece.view_as(x) for piece, x in zip(pieces, rows, strict=True)], rows)
            if self.ranks == 1:
                yield taken[0], function(sent.view(len(taken[0]), *self.shapes[taken[0][0]]))
                continue
            sizes = [sum(self.sizes[i][self.rank] for i in stack) for stack in taken]
            sizes += [0] * (self.ranks - len(taken))
            results = self._in_turn(function, sent, sizes, taken[self.rank] if self.rank < len(taken) else [])
            yield from zip(taken, results.split(sizes), strict=False)

    def _in_turn(self, function: Callable[[Tensor], Tensor], sent: Tensor, sizes: list[int], mine: list[int]) -> Tensor:
        """This rank's rows of one stack for each rank, of sizes[rank] elements, exchanged for those of the results.

        mine  the parts of this rank's stack, if it has one
        """
        counts = [[self.sizes[i][rank] for i in mine] for rank in range(self.ranks)]
        totals = [sum(of_rank) for of_rank in counts]
        received = sent.new_empty(sum(totals))
        dist.all_to_all_single(received, sent, totals, sizes)
        if mine:
            pieces = [x.split(of_rank) for x, of_rank in zip(received.split(totals), counts, strict=True)]
            wholes = [piece for of_part in zip(*pieces, strict=True) for piece in of_part]
            result = function(torch.cat(wholes).view(len(mine), *self.shapes[mine[0]]))
            cut = [x.reshape(-1).split(self.sizes[i]) for x, i in zip(result, mine, strict=True)]
            received = torch.cat([piece for of_rank in zip(*cut, strict=True) for piece in of_rank])
        results = torch.empty_like(sent)
        dist.all_to_all_single(results, received, sizes, totals)
        return results


def stacks(shapes: Sequence[torch.Size], most: int) -> list[list[int]]:
    """The indices of matrices of one shape, at most so many elements together."""
    made = []
    for shape in dict.fromkeys(shapes):
        same, count = [i for i, other in enumerate(shapes) if other == shape], max(1, most // shape.numel())
        made += [same[i : i + count] for i in range(0, len(same), count)]
    return made
