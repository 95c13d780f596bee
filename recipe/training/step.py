"""A training step as a pure function of its number.

Everything random in a step comes from counters: the batch from (seed, step), dropout's masks from (seed, step, layer,
sequence), and the draws of `attention.rng=torch` from a generator seeded with (seed, step, micro-step, rank). So a
checkpoint needs only weights, moments and a step number.

Nothing in a step waits for the device. Losses stay on it until a step is logged, and it decides itself to skip an
update whose loss or gradient is not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import DropoutKey
from attention.score import take_rows
from data.batches import Batch
from model.config import Recompute
from model.gpt import GPT
from recipe.distributed.config import DataParallel, ParallelConfig
from recipe.distributed.exchange import add_losses
from recipe.distributed.sharding import build_exchange, gathered, keep_shards, shard, share_sequences
from recipe.distributed.shared_update import share_update
from recipe.distributed.world import World
from recipe.errors import UserError
from recipe.training.average import MovingAverage
from recipe.training.config import TrainingConfig
from recipe.training.graphed_step import GraphedStep
from recipe.training.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    ScheduleConfig,
    learning_rate,
    set_learning_rate,
    update_parameters,
)
from recipe.training.state import AVERAGE, gather_state, restore_state

# Without this the compiler times several orders of a sum and takes the fastest, which differs between ranks and runs.
COMPILER_OPTIONS: dict[str, Any] = {"deterministic": True}
# fp16's loss scale is halved by an overflow and doubled after this many steps without one.
FIRST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2000


class NonFiniteError(UserError, RuntimeError):
    """A loss or gradient that became inf or NaN; the weights are those of the step before.

    step  the update that was not taken, counted from 1
    """

    def __init__(self, step: int, loss: float, norm: float) -> None:
        super().__init__(
            f"Step {step} was not finite (loss {loss:.4g}, gradient norm {norm:.4g}) and was not taken; "
            "resume from the last checkpoint with a lower optimizer.lr, or start with more schedule.warmup_steps."
        )
        self.step = step


def reseed(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed torch's default generators on every device in use for one micro-step, for `attention.rng=torch`."""
    number = int(np.random.SeedSequence((seed, step, micro_step, rank)).generate_state(1, np.uint64)[0])
    # torch.manual_seed would also format the call stack for each kind of device that is not in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


class Trainer:
    """Updates and evaluates a model."""

    def __init__(
        self,
        model: GPT,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        training: TrainingConfig,
        seed: int,
        device: torch.device,
        world: World,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Move `model` to `device`. `training.precision` is resolved, not auto."""
        self.training, self.schedule, self.peak_lr, self.clip = training, schedule, optimizer.lr, optimizer.clip
        parallel = parallel or ParallelConfig()
        self.seed, self.device, self.world = seed, device, replace(world, context=parallel.context)
        sequences = training.batch_size * self.world.data_size
        self.micro_steps = training.micro_steps(model.seq_len, self.world.data_size)
        self.tokens_per_step = sequences * model.seq_len * self.micro_steps
        self.dtype = training.precision.dtype
        self.model = model.to(device)
        self.context = share_sequences(model, self.world, parallel) if parallel.context > 1 else None
        sharded = parallel.data is DataParallel.shard and world.size > 1
        self.blueprint = shard(self.model, device, self.dtype, parallel) if sharded else None
        self.optimizer = share_update(OPTIMIZERS[optimizer.name](self.model, optimizer), world, parallel, sharded)
        self.average = MovingAverage(self.model, training.ema) if training.ema else None
        self.network: Callable[..., Tensor] = self.model
        self.exchange = build_exchange(self.optimizer, world, self.micro_steps, parallel, sharded)
        # FSDP2 gathers weights between blocks, so blocks are compiled one by one; also on one rank, for the same bits.
        if training.compile and parallel.data is DataParallel.shard:
            for block in self.model.h:
                # Without FSDP2's hooks, which block.compile() would trace.
                block.forward = torch.compile(block.forward, options=COMPILER_OPTIONS)
        elif training.compile:
            self.network = torch.compile(self.model, options=COMPILER_OPTIONS)
        self.replay: GraphedStep | None = None
        single = device.type == "cuda" and self.micro_steps == 1
        # Outside compiled code, recomputation saves the generators' states, which cannot be read while recording.
        recomputes = parallel.data is DataParallel.shard and model.computation.recompute is not Recompute.none
        # A profile assigns kernels to the operations that launch them; a replay has no such operations.
        if training.compile and training.cuda_graph and single and not (recomputes or training.profile):
            self.replay = GraphedStep(self._whole_step, device)

        # The loss is multiplied by `scale`, which is 1 except in fp16; `growth_tracker` counts steps since it changed.
        self.scale = torch.tensor(FIRST_SCALE if self.dtype is torch.float16 else 1.0, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int64, device=device)
        # Step, loss and gradient norm of the first update that was not finite; step -1: none.
        self.failure = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64, device=device)
        # Tensors on the device: a new step causes neither recompilation nor waiting.
        self.step, self.first_sequence = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.key = DropoutKey(torch.tensor(seed, device=device), self.step, 0, self.first_sequence)

    def dropout_key_for(self, step: int, micro_step: int) -> DropoutKey:
        """Seed the generators for a micro-step, and return its dropout key, which is valid until the next call."""
        reseed(self.seed, step, micro_step, self.world.rank)
        self.step.fill_(step)
        number = micro_step * self.world.data_size + self.world.data_rank
        self.first_sequence.fill_(number * self.training.batch_size)
        return self.key

    def update(self, step: int, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """The update after `step` updates, from its micro-batches on the device.

        Ranks that share sequences each receive whole ones. Returns the mean loss over all ranks and the gradient's norm
        before clipping, on the device. If one of them is not finite, this update and every later one leaves weights and
        moments alone; see `raise_failure`.
        """
        set_learning_rate(self.optimizer, learning_rate(step, self.training.steps, self.peak_lr, self.schedule))
        if self.replay is not None:
            self.dropout_key_for(step, 0)
            loss, norm = self.replay(*batches[0])
            return loss, norm
        losses = []
        for micro_step, batch in enumerate(batches):
            self.dropout_key_for(step, micro_step)
            losses.append(self._gradients(*batch))
        return self._apply(losses)

    def _gradients(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None = None) -> Tensor:
        """Add a micro-batch's gradients to the step's; returns its share of the step's loss."""
        with self.autocast():
            loss = self._loss(inputs, targets, document_starts, self.key) / (self.micro_steps * self.world.size)
        (loss * self.scale).backward()
        self.exchange.add()
        return loss.detach()

    def _loss(self, inputs: Tensor, targets: Tensor, document_starts: Tensor | None, key: DropoutKey | None) -> Tensor:
        """The mean loss over those tokens of a micro-batch that this rank has."""
        if self.context is None:
            return self.network(inputs, targets, dropout_key=key, document_starts=document_starts)
        attend, rows = self.context
        inputs, targets = (take_rows(x, rows, dim=1) for x in (inputs, targets))
        return self.network(inputs, targets, dropout_key=key, attend=attend, document_starts=document_starts, rows=rows)

    def _apply(self, losses: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Update the weights from the step's gradients, then clear the gradients."""
        norm = self.exchange.finish() / self.scale
        loss = add_losses(losses, self.world.size)
        overflow = ~norm.isfinite()
        # An overflow in fp16 is no failure as long as the scale can be reduced.
        failed = ~loss.isfinite() | (overflow & (self.scale <= 1))
        now = torch.stack([self.step.double(), loss.double(), norm.double()])
        self.failure.copy_(torch.where(failed & (self.failure[0] < 0), now, self.failure))
        divisor = self.scale * (norm / self.clip).clamp(min=1) if self.clip else self.scale
        skip = overflow | (self.failure[0] >= 0)
        update_parameters(self.optimizer, divisor, skip)
        if self.average is not None:
            self.average.update(self.step, skip)
        self.optimizer.zero_grad()
        if self.dtype is torch.float16:
            self._move_scale(overflow)
        return loss, norm

    def _whole_step(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """The device work of a step of one micro-batch."""
        return self._apply([self._gradients(*batch)])

    def release(self) -> None:
        """Drop the recorded CUDA graph: while there is one, NCCL cannot end the communicators in it."""
        if self.replay is not None:
            self.replay.release()

    def _wait_for_replay(self) -> None:
        """Wait for a captured step of several ranks, whose exchanges must end before others begin outside the graph."""
        if self.replay is not None and self.world.size > 1:
            torch.cuda.synchronize(self.device)

    def raise_failure(self) -> None:
        """Raise NonFiniteError with the step if an update was not finite. Waits for the device."""
        step, loss, norm = self.failure.tolist()
        if step >= 0:
            raise NonFiniteError(int(step) + 1, loss, norm)

    def measure(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The validation loss of the weights and, if there is one, of their moving average."""
        losses = {"val/loss": self.evaluate(batches)}
        if self.average is not None:
            with self.average.in_use():
                losses["val/loss_ema"] = self.evaluate(batches)
        return losses

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss over `batches`, divided among the ranks, without dropout."""
        self._wait_for_replay()
        self.model.eval()
        losses = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        rank, size = self.world.data_rank, self.world.data_size
        for i in range(rank, -(-len(batches) // size) * size, size):
            # Sharded ranks take part in every forward pass of the others; a rank without a batch repeats its last.
            inputs, targets, *rest = (tensor.to(self.device) for tensor in batches[min(i, len(batches) - 1)])
            with self.autocast():
                loss = self._loss(inputs, targets, rest[0] if rest else None, None)
            if i < len(batches):
                losses[i] = loss.double() / self.world.context
        self.model.train()
        keep_shards(self.model)
        if self.world.size > 1:
            dist.all_reduce(losses)  # of ranks with other sequences one has a loss and the rest 0: exact in any order
        return sum(losses.tolist()) / len(batches)

    def whole_model(self) -> GPT:
        """The model with whole parameters: a copy where they are sharded. Every rank calls this."""
        self._wait_for_replay()
        return self.model if self.blueprint is None else gathered(self.model, self.blueprint)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """This rank's part of a checkpoint, except the step."""
        return gather_state(self.model, self.optimizer, self._others())

    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint of `state`, written by any number of ranks. Raises CheckpointError."""
        averaged = restore_state(checkpoint, self.model, self.optimizer, self._others())
        if self.average is not None and not averaged:
            self.average.restart()

    def _others(self) -> dict[str, Tensor]:
        """The state that a checkpoint holds besides weights and moments."""
        average = {} if self.average is None else self.average.weights
        averages = {f"{AVERAGE}{name}": value for name, value in average.items()}
        return {"scale": self.scale, "growth_tracker": self.growth_tracker, **averages}

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def _move_scale(self, overflow: Tensor) -> None:
        self.growth_tracker.copy_(torch.where(overflow, 0, (self.growth_tracker + 1) % STEPS_TO_DOUBLE))
        grow = ~overflow & (self.growth_tracker == 0)
        self.scale.mul_(torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0)))
