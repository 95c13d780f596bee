"""The norm of a step's gradients, with the same bits on any number of ranks.

How a kernel adds depends on how a tensor is cut. So a large gradient is cut into equal pieces, whatever the number of
ranks; a norm is taken of each piece, and a norm of these. Ranks that share a gradient's rows each have some pieces.
Gradients whose pieces they do not divide evenly are each gathered on one rank, its owner.
"""

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


def shard_size(rank: int, ranks: int, shape: torch.Size) -> int:
    """The elements of a rank's shard of a tensor of this shape: FSDP2 cuts rows like torch.chunk."""
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

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        mesh = next((p.device_mesh for p in self.parameters if isinstance(p, DTensor)), None)
        self.ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        self.shares: dict[nn.Parameter, range] = {}  # the places of the norms that this rank takes of what it has
        undivided = {}
        self.count = 0
        for p in self.parameters:
            sharded = isinstance(p, DTensor) and p.placements[0].is_shard()
            places = range(self.count, self.count + pieces(p.shape))
            self.count = places.stop
            if sharded and len(places) % self.ranks:
                undivided[p] = places
            elif sharded:
                each = len(places) // self.ranks
                self.shares[p] = places[rank * each : (rank + 1) * each]
            elif rank == 0:
                self.shares[p] = places
        self.owners = Owners(list(undivided)) if undivided else None
        owned = [] if self.owners is None else [undivided[p] for p in self.owners.mine]
        in_order = [place for places in (*self.shares.values(), *owned) for place in places]
        self.places = torch.tensor(in_order, dtype=torch.int64, device=self.parameters[0].device)
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
        for p, places in self.shares.items():
            gradient = local_gradient(p)
            # How the kernel adds also depends on whether it can load 16 bytes at a time.
            yield from (gradient if gradient.data_ptr() % 16 == 0 else gradient.clone()).chunk(len(places))
        if self.owners is not None:
            for p, gradient in zip(self.owners.mine, self.owners.gather(), strict=True):
                yield from gradient.chunk(pieces(p.shape))


class Owners:
    """Sharded gradients as a whole, each on one rank: all of them in one all-to-all that moves each gradient once.

    mine  the parameters whose gradients this rank gets
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        ranks = dist.get_world_size()
        loads = [0] * ranks
        self.owned: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
        for p in sorted(parameters, key=lambda p: -p.numel()):
            owner = loads.index(min(loads))
            loads[owner] += p.numel()
            self.owned[owner].append(p)
        self.mine = self.owned[dist.get_rank()]
        self.sent = [sum(local(p).numel() for p in owned) for owned in self.owned]
        self.received = [[shard_size(rank, ranks, p.shape) for p in self.mine] for rank in range(ranks)]

    def gather(self) -> list[Tensor]:
        """The gradients of `mine`, flat."""
        sent = torch.cat([local_gradient(p) for owned in self.owned for p in owned])
        totals = [sum(sizes) for sizes in self.received]
        received = sent.new_empty(sum(totals))
        dist.all_to_all_single(received, sent, totals, self.sent)
        rows = [x.split(sizes) for x, sizes in zip(received.split(totals), self.received, strict=True)]
        return [torch.cat(of_ranks) for of_ranks in zip(*rows, strict=True)]


def local_gradient(p: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, flat; zeros where there is none."""
    return local(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
