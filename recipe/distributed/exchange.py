"""The sum of a step's gradients over all micro-batches and ranks.

Floating-point sums depend on their order. A step of n micro-batches adds its gradients in a fixed tree:

    ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)) + ...

With W ranks micro-batch m of rank r is leaf m W + r. Where W is a power of two, the ranks' gradients of one micro-step
are a subtree, which the ranks add together, and the sums of the micro-steps go up the tree like the carries of a binary
counter. So 1, 2 and 4 ranks give the same bits. The communication library adds in another order. It adds most sums of
two terms, which have only one order.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor

from attention.gpu import HAS_TRITON
from recipe.distributed.norm import ALIGNMENT, Norm, local

# Their names from torch 2.13 on, else the earlier ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange(ABC):
    """Sums gradients: `add` is called after each micro-batch, `finish` once a step."""

    norm: Norm

    def add(self) -> None:
        """Add the gradients of a micro-batch, which are in `.grad`. Unless overridden, autograd does."""

    @abstractmethod
    def collect(self) -> None:
        """Put the sum over all micro-batches and ranks in `.grad` of the optimizer's parameters."""

    def finish(self) -> Tensor:
        """The same; returns the sum's norm over all of them, 0-dim."""
        self.collect()
        return self.norm()


class TwoTerms(Exchange):
    """The sum of one or two terms, which has one order: autograd adds them, or the communication library."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        """ranks  number of ranks with different gradients; 1: nothing is exchanged"""
        self.parameters, self.ranks = [p for p in parameters if p.requires_grad], ranks
        self.norm = Norm(parameters)

    def collect(self) -> None:
        if self.ranks > 1:
            # One launch for all, each where it is: one flat tensor would have to be filled first.
            with _coalescing_manager(async_ops=False):
                for parameter in self.parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad)


class FixedTree(Exchange):
    """The sum in the order of the module's docstring."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: int) -> None:
        """ranks  number of ranks with different gradients; 1: this process has all gradients"""
        self.flat, self.ranks = FlatGradients(parameters, ranks), ranks
        self.carries, self.norm = Counter(), Norm(parameters)

    def add(self) -> None:
        mine = self.flat.take()
        self.carries.add(mine if self.ranks == 1 else add_shares(mine, mine.new_empty(mine.numel() // self.ranks)))

    def collect(self) -> None:
        total = self.carries.finish()
        if self.ranks > 1:
            share, total = total, total.new_empty(self.ranks * total.numel())
            all_gather(total, share)
        self.flat.give(total)


class Counter:
    """A pairwise sum of successive terms: level k holds the sum of 2^k of them, or nothing."""

    def __init__(self) -> None:
        self.levels: list[Tensor | None] = []

    def add(self, term: Tensor) -> None:
        """Add the next term; the counter owns it from then on."""
        for level, earlier in enumerate(self.levels):
            if earlier is None:
                self.levels[level] = term
                return
            term, self.levels[level] = earlier.add_(term), None
        self.levels.append(term)

    def finish(self) -> Tensor:
        """The sum of all terms; the counter is empty afterwards."""
        total = None
        for earlier in self.levels:
            if earlier is not None:
                total = earlier if total is None else earlier.add_(total)
        self.levels.clear()
        assert total is not None
        return total


def add_shares(mine: Tensor, share: Tensor) -> Tensor:
    """Fill this rank's share, (N / ranks,) fp32, of the sum of every rank's `mine` (N,), added pairwise in rank order.

    `mine` may have a lower precision. Sums are in fp32.
    """
    ranks = mine.numel() // share.numel()
    if ranks == 2 and mine.dtype is share.dtype:  # a sum of two has one order, the library's too
        reduce_scatter(share, mine)
        return share
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)
    return add_pairwise(received.view(ranks, -1), share)


def add_pairwise(terms: Tensor, out: Tensor) -> Tensor:
    """Fill out (N,), fp32, with the sum in fp32 of terms (ranks, N) of any precision, added pairwise."""
    if terms.is_cuda and HAS_TRITON:
        from recipe.distributed.pairwise_kernel import launch_add_pairwise

        launch_add_pairwise(terms, out)
        return out
    counter = Counter()
    for term in terms.to(torch.float32, copy=True):
        counter.add(term)
    return out.copy_(counter.finish())


def add_losses(losses: Sequence[Tensor], ranks: int) -> Tensor:
    """The sum of every rank's scalars, one for each micro-step, in the fixed tree."""
    terms = torch.stack(list(losses))[:, None]  # (micro-steps, ranks)
    if ranks > 1:
        every = terms.new_empty(ranks * len(terms))
        all_gather(every, terms.flatten())
        terms = every.view(ranks, -1).T
    while terms.shape[1] > 1 and terms.shape[1] % 2 == 0:
        terms = terms[:, 0::2] + terms[:, 1::2]
    counter = Counter()
    for term in terms.sum(dim=1):
        counter.add(term)
    return counter.finish()


class FlatGradients:
    """The gradients of some parameters as one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter], shares: int) -> None:
        """shares  the number of equal parts into which the tensor must divide"""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.sizes = [local(p).numel() for p in self.parameters]
        self.gaps = [-size % ALIGNMENT for size in self.sizes]
        length = sum(self.sizes) + sum(self.gaps)
        self.gaps[-1] += -length % (ALIGNMENT * shares)
        self.padding = torch.zeros(max(self.gaps), device=self.parameters[0].device)

    def take(self) -> Tensor:
        """A copy of all gradients, one after the other; `.grad` is None afterwards."""
        pieces = []
        for parameter, gap in zip(self.parameters, self.gaps, strict=True):
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            pieces += [local(gradient).reshape(-1), self.padding[:gap]]
            parameter.grad = None
        return torch.cat(pieces)

    def give(self, flat: Tensor) -> None:
        """Make each `.grad` a view of its part of `flat`."""
        start = 0
        for parameter, size, gap in zip(self.parameters, self.sizes, self.gaps, strict=True):
            view = flat[start : start + size].view(local(parameter).shape)
            if isinstance(parameter, DTensor):
                view = DTensor.from_local(
                    view,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = view
            start += size + gap
