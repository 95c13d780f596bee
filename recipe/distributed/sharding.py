"""Weights, gradients and moments spread over the ranks by FSDP2: each rank keeps some rows of every parameter.

A step gives the same bits as without sharding: the ranks add gradients in the fixed tree (exchange.py), and take norms
of the same pieces of them (norm.py).

Autocast rounds the matrices of the blocks before every product, and widens their gradients afterwards. Copies of them
in autocast's precision have the same values, and gradients that no cast has widened: ranks exchange half the bytes of
both, and lose no bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from model.gpt import GPT
from model.linear import Linear
from recipe.distributed.exchange import FixedTree, add_shares
from recipe.distributed.norm import local
from recipe.distributed.options import ParallelConfig


def rounded_by_autocast(model: GPT) -> list[nn.Parameter]:
    """The matrices of the blocks that only products read which autocast takes in its own precision."""
    return [module.get_parameter("weight") for module in model.h.modules() if isinstance(module, Linear)]


def rounded(matrix: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A copy in another precision."""
    return nn.Parameter(matrix.detach().to(dtype))


def with_others(model: GPT, others: Mapping[nn.Parameter, nn.Parameter]) -> GPT:
    """A copy of the model with other parameters in place of some. Everything else that it has is the model's."""
    shared: dict[int, object] = {id(x): x for x in (model.attend, *model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared | {id(p): other for p, other in others.items()})


def without_values(model: GPT) -> GPT:
    """A copy of the model on the meta device."""
    empty: dict[int, object] = {id(model.attend): model.attend}
    empty |= {id(x): torch.empty_like(x, device="meta") for x in model.buffers()}
    for p in model.parameters():
        empty[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copy.deepcopy(model, empty)


def sharded(model: GPT, device: torch.device, dtype: torch.dtype, config: ParallelConfig) -> GPT:
    """A copy of the first rank's model, spread over all ranks: none has more than its shards and one whole parameter
    on its device. Only the first rank's values are read; the others' models may lie on the meta device.

    A block gathers its matrices when it needs them, in autocast's `dtype`, to which autocast would round them there.
    Everything else is gathered once a step.
    """
    whole, model = model, without_values(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    matrices = set(rounded_by_autocast(model))
    policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
    # The backward pass begins with the parameters outside the blocks, so they are not dropped before it.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=matrices)
    for block in model.h:
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=policy,
            ignored_params=set(block.parameters()) - matrices,
        )
    for module in (model, *model.h):
        assert isinstance(module, FSDPModule)
        # A micro-batch's loss is already its share of the step's loss.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[arg-type]
    model.to_empty(device=device)
    fill(model, whole)
    return model


@torch.no_grad()
def fill(model: GPT, whole: GPT) -> None:
    """Give a sharded model the values that the first rank's `whole` one has, one tensor at a time."""
    targets, sources = (*model.parameters(), *model.buffers()), (*whole.parameters(), *whole.buffers())
    for target, source in zip(targets, sources, strict=True):
        part = local(target)
        value = source.to(part.device) if dist.get_rank() == 0 else torch.empty(source.shape, device=part.device)
        if isinstance(target, DTensor):
            part.copy_(distribute_tensor(value, target.device_mesh, target.placements).to_local())
        else:
            dist.broadcast(value, src=0)
            part.copy_(value)


def keep_shards(model: GPT) -> None:
    """Drop the whole parameters that a forward pass without a backward pass leaves in a sharded model. FSDP2 would use
    them again, although a replayed CUDA graph or the average's swap has changed the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gathered(model: GPT, blueprint: GPT) -> GPT:
    """A copy of a sharded model with whole parameters, on every rank. Every rank calls this."""
    whole = (
        copy.deepcopy(blueprint, {id(blueprint.attend): blueprint.attend})
        .to_empty(device=model.wte.weight.device)
        .train(model.training)
    )
    sources = (*model.parameters(), *model.buffers())
    for target, source in zip((*whole.parameters(), *whole.buffers()), sources, strict=True):
        target.copy_(source.full_tensor() if isinstance(source, DTensor) else source)
    return whole


class TreeReduceScatter:
    """FSDP2's reduction of gradients, in the order of `add_shares`: in fp32, whatever their precision."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        share = torch.empty_like(output_tensor, dtype=torch.float32)
        add_shares(input_tensor, share)
        output_tensor.data = share  # FSDP2 allocated it in the precision of the gradients


class ShardedTree(FixedTree):
    """The fixed tree for gradients that FSDP2 has already added over the ranks in each micro-step."""

    def __init__(self, parameters: Sequence[nn.Parameter], micro_steps: int) -> None:
        super().__init__(parameters, ranks=1)
        self.accumulates = micro_steps > 1

    def add(self) -> None:
        if self.accumulates:
            super().add()

    def collect(self) -> None:
        if self.accumulates:
            super().collect()
            return
        for parameter in self.flat.parameters:  # as where gradients are copied
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
