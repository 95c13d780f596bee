"""An update that ranks share: each updates its part of a parameter's rows and sends it to the others.

This is the first stage of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5): every rank has all weights and computes all gradients, but keeps moments only of some rows.
All ranks update a parameter that is small or whose rows they do not divide evenly.

A matrix that autocast rounds before every product is rounded before it travels: every rank has all of it in the lower
precision, and the rows that it updates in fp32.
"""

from collections.abc import Mapping
from itertools import accumulate, filterfalse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor, Replicate, Shard

from recipe.distributed.exchange import Counter, Exchange, FixedTree, add_pairwise, all_gather
from recipe.distributed.norm import Norm, divides, local


class SharedAdamW(torch.optim.AdamW):
    """AdamW of this rank's rows, followed by an exchange of all rows that are not rounded.

    shards  for each parameter that has gradients, the one that this rank updates: a DTensor whose local part is a view
            of this rank's rows or, where the ranks do not divide the rows, of all rows. A rounded copy has a shard of
            its own, in fp32.
    """

    def __init__(
        self, adamw: torch.optim.AdamW, mesh: DeviceMesh, copies: Mapping[nn.Parameter, nn.Parameter] | None = None
    ) -> None:
        """
        adamw   of the model's parameters: its groups are copied
        mesh    of all ranks, with one dimension
        copies  the rounded copies of some parameters whose rows the ranks divide, which have gradients in their place
        """
        copies = copies or {}
        self.mesh, self.ranks, self.rank = mesh, mesh.size(), mesh.get_local_rank()
        trained = [p for group in adamw.param_groups for p in group["params"] if p.requires_grad]
        self.shards: dict[nn.Parameter, nn.Parameter] = {}
        for p in trained:
            part = self.part(p.detach(), p)
            self.shards[copies.get(p, p)] = nn.Parameter(part.clone() if p in copies else part)
        self.rounded = {copy: self.shards[copy] for copy in copies.values()}
        parameters = list(self.shards)
        size, starts = sum(p.numel() for p in parameters), accumulate((p.numel() for p in parameters), initial=0)
        # One half is updated while the other travels: the rounded ones, else those in the second half of all elements.
        half_of = {
            p: int(p in self.rounded if self.rounded else 2 * start >= size)
            for p, start in zip(parameters, starts, strict=False)
        }
        self.halves = [[p for p in parameters if half_of[p] == half] for half in range(2)]
        groups = []
        for group in adamw.param_groups:
            of_group = [copies.get(p, p) for p in group["params"]]
            for half in range(2):
                shards = [self.shards[p] for p in of_group if half_of.get(p) == half]
                groups.append({**group, "params": shards, "half": half})
        super().__init__(groups, fused=True)

    def divides(self, p: nn.Parameter) -> bool:
        """Whether the ranks share the rows of this parameter of the model."""
        return divides(p.shape, self.ranks)

    def rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a tensor that the ranks divide: a view."""
        return tensor.chunk(self.ranks)[self.rank]

    def part(self, tensor: Tensor, p: nn.Parameter) -> DTensor:
        """The part of a tensor shaped like the parameter `p` that this rank updates: a view."""
        if self.divides(p):
            return self.of_rows(self.rows(tensor), p)
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)

    def of_rows(self, rows: Tensor, p: nn.Parameter) -> DTensor:
        """A tensor shaped like the parameter `p` of which this rank has these rows."""
        shape, stride = p.shape, p.stride()
        return DTensor.from_local(rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def spread(self) -> None:
        """Fill the rounded copies with all ranks' weights, before a forward pass."""
        copies = [copy.detach() for copy in self.rounded]
        rows = [self.rows(copy) for copy in copies]
        torch._foreach_copy_(rows, [local(shard) for shard in self.rounded.values()])
        with _coalescing_manager():
            for copy, updated in zip(copies, rows, strict=True):
                all_gather(copy, updated)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none where found_inf is 1. One half of the rows travels while the other half is updated; the
        rounded ones wait for `spread`."""
        groups, sent = self.param_groups, []
        for half, parameters in enumerate(self.halves):
            self.param_groups = [group for group in groups if group["half"] == half]
            super().step()
            with _coalescing_manager(async_ops=True) as work:
                for p in parameters:
                    if self.divides(p) and p not in self.rounded:
                        all_gather(p.detach(), self.rows(p.detach()))
            sent.append(work)
        self.param_groups = groups
        for work in sent:
            work.wait()


class SharedTree(Exchange):
    """An exchange of gradients for SharedAdamW, in the order of exchange.py: each rank receives the sums of the rows
    that it updates, in fp32."""

    def __init__(self, optimizer: SharedAdamW) -> None:
        self.optimizer, self.norm = optimizer, Norm(list(optimizer.shards.values()))
        divided = list(filter(optimizer.divides, optimizer.shards))
        parts = [[p for p in divided if (p in optimizer.rounded) == rounded] for rounded in (True, False)]
        self.parts = [(part, Counter()) for part in parts if part]
        self.undivided = list(filterfalse(optimizer.divides, optimizer.shards))
        self.rest = FixedTree(self.undivided, optimizer.ranks) if self.undivided else None

    def add(self) -> None:
        """Add a micro-batch's gradients. One part of them travels while another is copied or added."""
        sent = [self._send(part) for part, _ in self.parts]
        for (_, sums), (terms, work) in zip(self.parts, sent, strict=True):
            work.wait()
            sums.add(add_pairwise(terms, torch.empty_like(terms[0], dtype=torch.float32)))
        if self.rest is not None:
            self.rest.add()

    def _send(self, parameters: list[nn.Parameter]) -> tuple[Tensor, dist.Work]:
        """Begin to exchange gradients for those of this rank's rows from every rank: (ranks, elements)."""
        ranks = self.optimizer.ranks
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).chunk(ranks) for p in parameters]
        mine = torch.cat([part.reshape(-1) for of_rank in zip(*parts, strict=True) for part in of_rank])
        for p in parameters:
            p.grad = None
        received = torch.empty_like(mine)
        return received.view(ranks, -1), dist.all_to_all_single(received, mine, async_op=True)

    def collect(self) -> None:
        """Put the sums in `.grad` of the optimizer's parameters, and clear the model's."""
        optimizer = self.optimizer
        for part, sums in self.parts:
            for p, rows in zip(part, sums.finish().split([p.numel() // optimizer.ranks for p in part]), strict=True):
                optimizer.shards[p].grad = optimizer.of_rows(rows.view(-1, *p.shape[1:]), p)
        if self.rest is not None:
            self.rest.collect()
        for p in self.undivided:
            assert p.grad is not None
            optimizer.shards[p].grad, p.grad = optimizer.part(p.grad, p), None
