"""How the ranks of a run share its steps. A trainer uses other ranks only through this class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attention.errors import UnsupportedAttention
from attention.score import Range, take_rows
from data.batches import Batch
from model.further import further
from model.gpt import GPT
from recipe.distributed.context import WRAPPERS, ContextAttention, rows_of, shared_by
from recipe.distributed.exchange import Exchange, FixedTree, TwoTerms, add_losses
from recipe.distributed.norm import divides
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.ranks import patience
from recipe.distributed.sharded_update import with_bits_of_wholes
from recipe.distributed.sharding import (
    ShardedTree,
    gathered,
    keep_shards,
    rounded,
    rounded_by_autocast,
    sharded,
    with_others,
    without_values,
)
from recipe.distributed.shared_update import SharedAdamW, SharedTree
from recipe.distributed.world import World


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
        self.sharded = config.data is DataParallel.shard and world.size > 1
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

    def total_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of every rank's shares of a step's loss, one for each micro-step."""
        return add_losses(losses, self.world.size)

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
        return attend, rows_of(world.context_rank, world.context, model.seq_len, by)
