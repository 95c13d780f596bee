"""How the ranks of a run share its steps. A trainer uses other ranks only through `Sharing`.

Sharded by FSDP2, each rank keeps some rows of every weight, gradient and moment. A step gives the same bits as without:
the ranks add gradients in the fixed tree (exchange.py), and take norms of the same pieces of them (norm.py).

Autocast rounds the matrices of the blocks before every product, and widens their gradients afterwards. Copies of them
in autocast's precision have the same values, and gradients that no cast has widened: ranks exchange half the bytes of
both, and lose no bit.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from attention.errors import UnsupportedAttention
from attention.score import Range, take_rows
from data.batches import Batch
from model.further import further
from model.gpt import GPT
from model.linear import Linear
from recipe.distributed.context import WRAPPERS, ContextAttention, rows_of, shared_by
from recipe.distributed.exchange import Exchange, FixedTree, TwoTerms, add_shares
from recipe.distributed.norm import divides, local
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.ranks import patience
from recipe.distributed.sharded_update import with_bits_of_wholes
from recipe.distributed.shared_update import SharedAdamW, SharedTree
from recipe.distributed.world import World


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
            reshard_after_forward=config.data is DataParallel.shard,
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


class Sharing:
    """A model on its device, in the form in which the ranks share it, and this rank's part of a step.

    world      the place of this rank
    model      whole, or this rank's shards of it
    computing  the model that computes losses and gradients, once `spread` has filled it with the weights of `model`
    context    where successive ranks share every sequence, the attention to call and this rank's rows
    """

    def __init__(
        self, model: GPT, world: World, config: ParallelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Move `model` to `device`, or the shards of it that this rank keeps; `dtype` is autocast's."""
        self.world, self.device, self.dtype = world, device, dtype
        self.sharded = config.shards and world.size > 1
        self.blueprint = without_values(model) if self.sharded else None
        self.model = sharded(model, device, dtype, config) if self.sharded else model.to(device)
        self.context = self._share_sequences() if world.context > 1 else None
        self.computing = self.model
        self.spread: Callable[[], None] = lambda: None

    def share_update(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, or one like it whose update the ranks share.

        Only the update of torch's AdamW is shared. With a sharded model every optimizer already updates only this
        rank's rows.
        """
        ranks = self.world.size
        if ranks == 1 or type(optimizer) is not torch.optim.AdamW:
            return optimizer
        if self.sharded:
            return with_bits_of_wholes(optimizer)
        trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
        if not any(divides(p.shape, ranks) for p in trained):
            return optimizer
        mesh = init_device_mesh(self.device.type, (ranks,))
        matrices = [p for p in rounded_by_autocast(self.model) if p.requires_grad and divides(p.shape, ranks)]
        if self.dtype is torch.float32 or not matrices:
            return SharedAdamW(optimizer, mesh)
        copies = {p: rounded(p, self.dtype) for p in matrices}
        shared = SharedAdamW(optimizer, mesh, copies)
        self.blueprint = without_values(self.model)
        self.computing = with_others(self.model, copies)
        self.model = with_others(self.model, {p: shared.shards[copy] for p, copy in copies.items()})
        self.spread = shared.spread
        return shared

    def exchange(self, optimizer: torch.optim.Optimizer, micro_steps: int) -> Exchange:
        """The exchange of gradients for steps of `micro_steps` micro-batches on each rank."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.sharded:
            return ShardedTree(parameters, micro_steps)
        if isinstance(optimizer, SharedAdamW):
            return SharedTree(optimizer)
        return (TwoTerms if self.world.size * micro_steps <= 2 else FixedTree)(parameters, self.world.size)

    def part(self, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """This rank's inputs and targets of a micro-batch of whole sequences, and the model's arguments for them."""
        predicts_further = self.model.further is not None and self.computing.training
        after = further(batch.inputs, batch.targets) if predicts_further else None
        if self.context is None:
            return batch.inputs, batch.targets, {"further": after}
        attend, rows = self.context
        inputs, targets = (take_rows(x, rows, dim=1) for x in (batch.inputs, batch.targets))
        return inputs, targets, {"attend": attend, "rows": rows, "further": after and after.rows(rows)}

    def validation_losses(self, loss_of: Callable[[Batch], Tensor], batches: Sequence[Batch]) -> list[float]:
        """The loss of each batch, on every rank. The ranks divide the batches among them."""
        losses = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        rank, size = self.world.data_rank, self.world.data_size
        for i in range(rank, -(-len(batches) // size) * size, size):
            # Sharded ranks take part in every forward pass of the others; a rank without a batch repeats its last.
            loss = loss_of(batches[min(i, len(batches) - 1)])
            if i < len(batches):
                losses[i] = loss.double() / self.world.context
        keep_shards(self.model)
        if self.world.size > 1:
            dist.all_reduce(losses)  # of ranks with other sequences one has a loss and the rest 0: exact in any order
        return losses.tolist()

    def whole_model(self) -> GPT:
        """The model with whole parameters: a copy where they are sharded. Every rank calls this."""
        return self.model if self.blueprint is None else gathered(self.model, self.blueprint)

    def _share_sequences(self) -> tuple[ContextAttention, tuple[Range, ...]]:
        model, world = self.model, self.world
        by = shared_by(model.config.n_heads, model.config.kv_heads, world.context)
        group = dist.group.WORLD
        if world.context < world.size:
            group, _ = dist.new_subgroups(world.context, timeout=patience(self.device))
        assert group is not None
        attend = WRAPPERS[by](model.attend, group)
        for score in model.scores:
            attend.add_score(score, model.config.n_heads)
        if made := model.made_tensors():
            raise UnsupportedAttention(
                f"parallel.context={world.context} does not support tensors that are made from the input, such as "
                f"score.tensors.{made[0]}; use parallel.context=1."
            )
        return attend, rows_of(world.rank % world.context, world.context, model.seq_len, by)
