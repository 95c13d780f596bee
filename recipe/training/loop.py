"""The training loop: updates, and between them logging, evaluation, parity probes and checkpoints."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from data.batches import Batch
from model.config import GPTConfig
from recipe.errors import UserError
from recipe.parity.probe import ParityProbe
from recipe.profiling.meters import StepMeter
from recipe.profiling.profiler import Profiler
from recipe.training.optimizer import learning_rate
from recipe.training.step import Trainer

# In messages about exhausted memory: of torch's allocators, and of the system when a thread gets no stack.
SIGNS_OF_FULL_MEMORY = ("out of memory", "allocate memory", "can't start new thread", "temporarily unavailable")


class OutOfMemory(UserError, RuntimeError):
    """The run did not fit into memory; the message says how to make it smaller."""


class Interruption:
    """Defers SIGINT, SIGTERM and SIGUSR2 until the step is finished; a second one acts at once.

    Slurm sends SIGUSR2 some time before a job ends if it was asked to (sbatch --signal=USR2@120).

    number     of the signal received, else None
    timeout_s  how long to wait for the other ranks, which have to stop after the same step
    """

    def __init__(self, timeout_s: float) -> None:
        self.number: int | None = None
        self.timeout_s = timeout_s
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()

    def pass_on(self) -> None:
        """Give SIGUSR2 to whoever waited for it before, such as submitit, which then queues the job again."""
        if self.number == signal.SIGUSR2 and callable(self._handlers[signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)

    def agreed(self) -> bool:
        """Whether to stop after this step. Ranks have to stop after the same one, so their hosts ask each other; none
        waits for its device."""
        if not dist.is_initialized():
            return self.number is not None
        number = torch.tensor(self.number or 0)
        asked = dist.all_reduce(number, dist.ReduceOp.MAX, async_op=True)
        asked.wait(timedelta(seconds=self.timeout_s))
        # The others do not know of a signal that came during the exchange: it is kept for the next one.
        if agreed := int(number):
            self.number = agreed
        return agreed != 0


def fit(
    trainer: Trainer,
    batches: Iterator[Batch],
    windows: Sequence[Batch],
    *,
    meter: StepMeter,
    probe: ParityProbe | None,
    profiler: Profiler,
    log: Callable[[int, dict[str, Any]], None],
    save: Callable[[int, float | None], None],
    interruption: Interruption,
    start: int = 0,
) -> int:
    """Train from `start` updates to `training.steps`, or until `interruption`, and return the updates done.

    batches  on the device, in the order of (step, micro-step) from (start, 0) on
    windows  batches for the validation loss
    log      called with n and metrics after n updates
    save     called with n and the validation loss after n updates, if it was measured

    Raises NonFiniteError; earlier checkpoints stay.
    """
    config = trainer.training
    if start == 0 and config.eval_every:
        with meter.paused():
            measured = trainer.measure(windows)
        log(0, measured)
    for step in range(start, config.steps):
        n = step + 1  # updates done when this one is

        def is_due(every: int, n: int = n) -> bool:
            return every > 0 and (n % every == 0 or n == config.steps)

        if step == profiler.first:
            with meter.paused():
                profiler.start()
        meter.step_start()
        with meter.waiting_for_data(), record_function("data"):
            micro_batches = [next(batches) for _ in range(trainer.micro_steps)]
        metrics: dict[str, Any] = {}
        if probe is not None and probe.is_due(step):
            with meter.paused():
                metrics = compare(probe, trainer, step, micro_batches[0])
            meter.step_start()
        loss, norm = trainer.update(step, micro_batches)
        meter.step_end()
        if step == profiler.last:
            with meter.paused():
                metrics |= profiler.stop()

        stopping = interruption.agreed()
        if not (
            metrics or stopping or any(map(is_due, (config.log_every, config.eval_every, config.checkpoint_every)))
        ):
            continue
        trainer.raise_failure()  # before these weights are measured or saved
        lr = learning_rate(step, config.steps, trainer.peak_lr, trainer.schedule)
        metrics |= {"train/loss": loss.item(), "optim/lr": lr, "optim/grad_norm": norm.item()}
        metrics |= meter.interval(trainer.replay.peak_bytes if trainer.replay else 0)
        if is_due(config.eval_every):
            with meter.paused():
                metrics |= trainer.measure(windows)
        log(n, metrics)  # counts as training time: frequent logging slows training
        if is_due(config.checkpoint_every) or (stopping and config.checkpoint_every):
            with meter.paused():
                save(n, metrics.get("val/loss"))
        if stopping:
            return n
    return config.steps


def compare(probe: ParityProbe, trainer: Trainer, step: int, batch: Batch) -> dict[str, Any]:
    """The parity probe's metrics on the step's first micro-batch, with the dropout masks of its training."""
    inputs, targets, *rest = batch
    key, scale = trainer.dropout_key_for(step, 0), trainer.scale.item()
    return probe.measure(trainer.whole_model(), inputs, targets, key, scale, rest[0] if rest else None)


@contextmanager
def oom_guard(sentence: str) -> Iterator[None]:
    """Turn running out of memory into OutOfMemory with `sentence`, which says what does not fit and what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS_OF_FULL_MEMORY):
            raise
        raise OutOfMemory(sentence) from error


def too_large_model(model: GPTConfig, device: torch.device) -> str:
    """The sentence for a model that does not fit even without training."""
    return (
        f"A model with model.n_layers={model.n_layers} and model.n_embd={model.n_embd} does not fit the memory of "
        f"{device} with its gradients and moments; choose smaller ones, or a device with more memory."
    )


def too_large_step(trainer: Trainer) -> str:
    """The sentence for a training step that does not fit."""
    model, training = trainer.model, trainer.training
    linear = "an attention whose memory is linear in seq_len (attention=flash on a GPU, tiled or sdpa), "
    return (
        f"attention={model.attend.name} with seq_len={model.seq_len} and training.batch_size={training.batch_size} "
        f"does not fit the memory of {trainer.device}; use {linear if model.attend.name == 'naive' else ''}"
        "training.recompute=block, or a smaller training.batch_size with training.batch_tokens to keep the tokens of a "
        "step."
    )
