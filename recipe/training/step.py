"""A training step as a pure function of its number.

Everything random in a step comes from counters: the batch from (seed, step), dropout's masks from (seed, step, layer,
sequence), and the draws of `attention.rng=torch` from a generator seeded with (seed, step, micro-step, rank). So a
checkpoint needs only weights, moments and a step number.

Nothing in a step waits for the device. Losses stay on it until a step is logged, and it decides itself to skip an
update whose loss or gradient is not finite.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import DropoutKey, DropoutRng
from attention.gpu import capturing
from data.batches import Batch
from model.gpt import GPT
from model.options import Recompute
from recipe.distributed.exchange import Exchange, add_losses
from recipe.distributed.sharing import Sharing
from recipe.errors import UserError
from recipe.training.optimizer import set_learning_rate, update_parameters
from recipe.training.options import TrainingConfig
from recipe.training.state import AVERAGE, MovingAverage, gather_state, restore_state

# Else the compiler times several orders of a sum and takes the fastest, which differs between ranks and runs.
COMPILER_OPTIONS: dict[str, Any] = {"deterministic": True}
# fp16's loss scale is halved by an overflow and doubled after this many steps without one.
FIRST_SCALE, STEPS_TO_DOUBLE = 2.0**16, 2000
# Calls before recording: the graph must not contain compilation, autotuning or lazy initialisation.
WARMUP_CALLS = 3


class NonFiniteError(UserError, RuntimeError):
    """A loss or gradient that became inf or NaN; the weights are still those before the step.

    step  the update that was not taken, counted from 1
    """

    def __init__(self, step: int, loss: float, norm: float) -> None:
        remedy = "resume from the last checkpoint with a lower optimizer.lr, or start with more schedule.warmup_steps."
        if step == 1:
            remedy = (
                "no weight had changed yet, so change what the run starts from: score.formula, the init of its learned "
                "tensors, the weights of init_from, or an attention of your own."
            )
        super().__init__(
            f"Step {step} was not finite (loss {loss:.4g}, gradient norm {norm:.4g}) and was not taken; {remedy}"
        )
        self.step = step


def reseed(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed torch's default generators on every device in use for one micro-step, for `attention.rng=torch`."""
    number = int(np.random.SeedSequence((seed, step, micro_step, rank)).generate_state(1, np.uint64)[0])
    # torch.manual_seed would also format the call stack for each kind of device that is not in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


class GraphedStep:
    """Calls `function`, from the fourth call on by replaying it as a CUDA graph, which a single launch starts.

    A small model's kernels take less time than Python needs to launch them. With a replayed graph the device never
    waits for launches. Everything that varies from step to step must be data at a fixed address: the batch, the dropout
    key, the learning rate. Random numbers follow the default generator's seed at the time of the replay.

    function     tensors in, named tensors out. It never looks at a value, and everything else that it reads or writes
                 keeps its address. The next call overwrites its results.
    peak_bytes   peak of the memory allocated while recording: the allocator does not see replays
    """

    def __init__(self, function: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self.calls, self.peak_bytes = 0, 0
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: dict[str, Tensor] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """function(*inputs), with the same shapes in every call."""
        self.calls += 1
        if not self.inputs:
            self.inputs = tuple(tensor.clone() for tensor in inputs)
        # Already before recording: a view may start where a compiled function compiles again for a whole tensor.
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        if self.calls <= WARMUP_CALLS:
            return self._warm_up()
        if self.graph is None:
            self._record()
        self.graph.replay()  # type: ignore[union-attr]
        return self.outputs

    def release(self) -> None:
        """Drop the graph; a further call records another."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.inputs, self.outputs = None, (), {}

    def _warm_up(self) -> dict[str, Tensor]:
        """Call on the stream that will record, because autograd remembers the first stream it sees."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = self.function(*self.inputs)
        current.wait_stream(self.stream)
        return outputs

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.stream):
            self.outputs = self.function(*self.inputs)
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.graph = graph


class Trainer:
    """Updates and evaluates a model.

    global_batch     the sequences of a step, and this rank's
    tokens_per_step  over all ranks
    """

    def __init__(
        self,
        sharing: Sharing,
        optimizer: torch.optim.Optimizer,
        exchange: Exchange,
        network: Callable[..., Tensor],
        training: TrainingConfig,
        seed: int,
        *,
        learning_rate: Callable[[int], float],
        clip: float,
        replayed: bool = False,
    ) -> None:
        """
        sharing        the model, and this rank's part of a step
        optimizer      of its parameters
        exchange       of their gradients
        network        the model that computes, as compiled
        training       its precision is resolved, not auto
        seed           of everything random
        learning_rate  of the update after so many
        clip           largest norm of the gradient over all parameters; 0: no clipping
        replayed       replay steps on a GPU as a CUDA graph
        """
        self.sharing, self.model, self.network, self.exchange = sharing, sharing.model, network, exchange
        self.optimizer, self.learning_rate, self.clip = optimizer, learning_rate, clip
        self.training, self.seed, self.dtype = training, seed, training.precision.dtype
        self.world, self.device = sharing.world, sharing.device
        self.global_batch = training.share(self.model.seq_len, self.world)
        self.micro_steps = self.global_batch.micro_steps
        self.tokens_per_step = self.global_batch.sequences * self.model.seq_len
        self.average = MovingAverage(self.model, training.ema) if training.ema else None
        self.replay = GraphedStep(self._whole_step, self.device) if replayed and self.device.type == "cuda" else None

        device = self.device
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
        self.first_sequence.fill_(self.global_batch.first_sequence(micro_step))
        return self.key

    def update(self, step: int, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """The update after `step` updates, from its micro-batches on the device.

        Ranks that share sequences each receive whole ones. Returns the step's metrics by their names in metrics.jsonl,
        0-dim tensors that the host need not wait for: among them the mean loss over all ranks, and the gradient's norm
        before clipping. If one of these is not finite, this update and every later one leaves weights and moments
        alone; see `raise_failure`.
        """
        lr = self.learning_rate(step)
        set_learning_rate(self.optimizer, lr)
        metrics = {"optim/lr": torch.tensor(lr, dtype=torch.float64)}
        if self.replay is not None:
            self.dropout_key_for(step, 0)
            return metrics | self.replay(*(tensor for batch in batches for tensor in batch.tensors()))
        self.sharing.spread()
        losses = []
        for micro_step, batch in enumerate(batches):
            self.dropout_key_for(step, micro_step)
            losses.append(self._gradients(batch))
        return metrics | self._apply(losses)

    def _gradients(self, batch: Batch) -> Tensor:
        """Add a micro-batch's gradients to the step's; returns its share of the step's losses (`GPT.forward`)."""
        with self.autocast():
            loss = self._loss(batch, self.key) / (self.micro_steps * self.world.size)
        (self.model.objective(loss) * self.scale).backward()
        self.exchange.add()
        return loss.detach()

    def _loss(self, batch: Batch, key: DropoutKey | None) -> Tensor:
        """The mean loss over those tokens of a micro-batch that this rank has, or their sum by `batch.learned`."""
        inputs, targets, options = self.sharing.part(batch)
        if batch.learned is not None:
            options["count"] = batch.learned / self.world.context
        return self.network(inputs, targets, dropout_key=key, document_starts=batch.document_starts, **options)

    def _apply(self, losses: list[Tensor]) -> dict[str, Tensor]:
        """Update the weights from the step's gradients, then clear the gradients. Returns the step's metrics."""
        norm = self.exchange.finish() / self.scale
        # A second head has a separate loss.
        parts = zip(*(x.reshape(-1) for x in losses), strict=True)
        loss, *further = (add_losses(part, self.world.size) for part in parts)
        overflow = ~norm.isfinite()
        # An overflow in fp16 is no failure as long as the scale can be reduced.
        failed = ~torch.stack([loss, *further]).isfinite().all() | (overflow & (self.scale <= 1))
        now = torch.stack([self.step.double(), loss.double(), norm.double()])
        self.failure.copy_(torch.where(failed & (self.failure[0] < 0), now, self.failure))
        divisor = self.scale * (norm / self.clip).clamp(min=1) if self.clip else self.scale
        skip = overflow | (self.failure[0] >= 0)
        update_parameters(self.optimizer, divisor, skip)
        if self.average is not None:
            self.average.update(self.step, skip)
        self.optimizer.zero_grad()
        if self.dtype is torch.float16:
            self.growth_tracker.copy_(torch.where(overflow, 0, (self.growth_tracker + 1) % STEPS_TO_DOUBLE))
            self.scale.mul_(torch.where(overflow, 0.5, torch.where(~overflow & (self.growth_tracker == 0), 2.0, 1.0)))
        return {"train/loss": loss, "optim/grad_norm": norm} | dict(zip(["train/loss_mtp"], further, strict=False))

    def _whole_step(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The device work of a step, from the tensors of its micro-batches one after the other."""
        self.sharing.spread()
        each, losses = len(tensors) // self.micro_steps, []
        for micro_step in range(self.micro_steps):
            self.first_sequence.fill_(self.global_batch.first_sequence(micro_step))
            losses.append(self._gradients(Batch(*tensors[micro_step * each : (micro_step + 1) * each])))
        return self._apply(losses)

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
        self.sharing.spread()
        self.sharing.computing.eval()
        losses = self.sharing.validation_losses(self._validation_loss, batches)
        self.sharing.computing.train()
        return sum(losses) / len(batches)

    def _validation_loss(self, batch: Batch) -> Tensor:
        with self.autocast():
            return self._loss(batch.map(lambda tensor: tensor.to(self.device)), None)

    def whole_model(self) -> GPT:
        """The model with whole parameters: a copy where they are sharded. Every rank calls this."""
        self._wait_for_replay()
        return self.sharing.whole_model()

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


def compiled(model: GPT, in_blocks: bool) -> Callable[..., Tensor]:
    """The model, compiled as one, or each block.

    FSDP2 gathers weights between blocks, so blocks are compiled one by one; also on one rank, for the same bits. The
    compiler does not look into mixers, and would compile each block around them anew.
    """
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(is_no_reminder_of_policies)
    if not in_blocks:
        return torch.compile(model, options=COMPILER_OPTIONS)
    for block in (*model.h, *([] if model.further is None else [model.further.block])):
        # Without FSDP2's hooks, which block.compile() would trace.
        block.forward = torch.compile(block.forward, options=COMPILER_OPTIONS)
    return model


def can_replay(training: TrainingConfig, rng: DropoutRng, micro_steps: int, in_blocks: bool, mixes: bool) -> bool:
    """Whether a step on a GPU can be replayed as a CUDA graph.

    rng        of the attention's dropout
    in_blocks  whether the model is compiled block by block
    mixes      whether it has mixers
    """
    # A replay takes the generators' seed once, and each micro-step has a different one.
    reseeds = rng is DropoutRng.torch and micro_steps > 1
    # Outside compiled code, recomputation saves the generators' states, which cannot be read while recording.
    recomputes = in_blocks and training.recompute is not Recompute.none
    # A profile assigns kernels to the operations that launch them; a replay has no such operations.
    # Chunks that begin at each document are counted on the host; the package's kernels tune themselves.
    return training.compile and not (reseeds or recomputes or mixes or training.profile)


def is_no_reminder_of_policies(record: logging.LogRecord) -> bool:
    """Whether a record of torch's log is anything but the reminder that recomputed code with a policy, which is what
    model/blocks.py compiles, may contain no operator that works in place. It contains none."""
    return "context_fn is passed" not in record.getMessage()
