"""The norm of a step's gradients, with the same bits on any number of ranks.

How a kernel adds depends on how a tensor is cut. So a large gradient is cut into equal pieces, whatever the number of
ranks; a norm is taken of each piece, and a norm of these. Ranks that share a gradient's rows each have some pieces.
Gradients whose pieces they do not divide evenly are each gathered on one rank, its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ALIGNMENT = 32  # elements; the start of every piece is a multiple of it, which suits every kernel that reads them
PIECES = 8  # most pieces of a gradient: in an uncompiled step the host takes 3 microseconds for each
PIECE = 2**16  # fewest elements in one: as many as a block of a GPU adds


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kept_by(rank: int, ranks: int, shape: torch.Size) -> int:
    """The number of elements that a rank keeps of a tensor of this shape: FSDP2 cuts rows like torch.chunk."""
    each = -(-shape[0] // ranks)
    return max(0, min(each, shape[0] - rank * each)) * shape[1:].numel()


def divides(shape: torch.Size, parts: int) -> bool:
    """Whether a tensor of this shape can be cut into so many equal parts of whole rows that are worth it."""
    size = shape.numel()
    return size >= parts * PIECE and shape[0] % parts == 0 and size % (parts * ALIGNMENT) == 0


def pieces(shape: torch.Size) -> int:
    """The number of pieces of a gradient of this shape: a power of two."""
    count = 1
    while count < PIECES and divides(shape, 2 * count):
        count *= 2
    return count


class Norm:
    """The Euclidean norm of the gradients of some parameters together: whole, or of the rows that this rank has."""

    def __init__(self, parameters: Sequence[nn.Parameter], exact: bool = True) -> None:
        """exact  the same bits on any number of ranks; false: of sharded gradients one piece for each rank"""
        self.parameters = [p for p in parameters if p.requires_grad]
        mesh = next((p.device_mesh for p in self.parameters if isinstance(p, DTensor)), None)
        self.ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.counts: list[int] = []  # of each gradient the pieces in this rank's part of it
        self.count = 0
        undivided, places, firsts = list[nn.Parameter](), list[int](), dict[nn.Parameter, int]()
        for p in self.parameters:
            count, own, first = pieces(p.shape), 0, 0
            if not (isinstance(p, DTensor) and p.placements[0].is_shard()):
                own = count if rank == 0 else 0
            elif not exact:
                count, own, first = self.ranks, 1, rank
            elif count % self.ranks == 0:
                own = count // self.ranks
                first = rank * own
            else:
                undivided.append(p)
            self.counts.append(own)
            firsts[p] = self.count
            places += range(self.count + first, self.count + first + own)
            self.count += count
        self.owners = Owners(undivided) if undivided else None
        for p in [] if self.owners is None else self.owners.mine:
            places += range(firsts[p], firsts[p] + pieces(p.shape))
        self.places = torch.tensor(places, dtype=torch.int64, device=self.parameters[0].device)
        self.none = torch.empty(0, device=self.places.device)

    def __call__(self) -> Tensor:
        """0-dim fp32, on every rank."""
        found = list(self._pieces())
        # A rank may have no piece at all.
        norms = torch.stack(torch._foreach_norm(found)).float() if found else self.none
        if self.ranks > 1:
            norms = norms.new_zeros(self.count).index_copy_(0, self.places, norms)
            dist.all_reduce(norms)  # each is one rank's and zero elsewhere: exact in any order
        return torch.linalg.vector_norm(norms)

    def _pieces(self) -> Iterator[Tensor]:
        """The pieces of which this rank takes the norms, in the order of `places`."""
        for p, own in zip(self.parameters, self.counts, strict=True):
            if own:
                gradient = local(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                # How the kernel adds also depends on whether it can load 16 bytes at a time.
                yield from (gradient if gradient.data_ptr() % 16 == 0 else gradient.clone()).chunk(own)
        if self.owners is not None:
            for p, whole in zip(self.owners.mine, self.owners.gather(), strict=True):
                yield from whole.chunk(pieces(p.shape))


class Owners:
    """Sharded gradients as a whole, each on one rank: all of them in one all-to-all that moves each gradient once.

    mine  the parameters whose gradients this rank gets
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        ranks, self.rank = dist.get_world_size(), dist.get_rank()
        loads = [0] * ranks
        self.owned: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
        for p in sorted(parameters, key=lambda p: -p.numel()):
            owner = loads.index(min(loads))
            loads[owner] += p.numel()
            self.owned[owner].append(p)
        self.mine = self.owned[self.rank]
        rows = [[local(p).numel() for p in owned] for owned in self.owned]
        self.sent = [0 if rank == self.rank else sum(rows[rank]) for rank in range(ranks)]
        shapes = [p.shape for p in self.mine]
        self.received = [
            [] if rank == self.rank else [kept_by(rank, ranks, shape) for shape in shapes] for rank in range(ranks)
        ]
        self.lengths = [length for shape in shapes for length in (shape.numel(), -shape.numel() % ALIGNMENT)]
        self.gap = torch.zeros(ALIGNMENT, device=local(parameters[0]).device)

    def gather(self) -> list[Tensor]:
        """The gradients of `mine`, flat."""
        others = [p for rank, owned in enumerate(self.owned) if rank != self.rank for p in owned]
        sent = torch.cat([self.gap[:0], *(self._rows(p) for p in others)])
        sizes = [sum(counts) for counts in self.received]
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, self.sent)
        rows = [piece.split(counts) for piece, counts in zip(received.split(sizes), self.received, strict=True)]
        rows[self.rank] = tuple(self._rows(p) for p in self.mine)
        parts = [self.gap[:0]]
        for of_ranks, length in zip(zip(*rows, strict=True), self.lengths[1::2], strict=True):
            parts += [*of_ranks, self.gap[:length]]
        return list(torch.cat(parts).split(self.lengths)[0::2]) if self.mine else []

    @staticmethod
    def _rows(p: nn.Parameter) -> Tensor:
        """This rank's part of a gradient, flat."""
        return local(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
