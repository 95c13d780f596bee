"""The training loop: updates, and between them logging, evaluation, parity probes and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from data.batches import Batch, Source
from data.prefetcher import Prefetcher
from recipe.training.checkpoint import save_checkpoint
from recipe.training.device import cpu_memory_limit, oom_guard
from recipe.training.interruption import Interruption
from recipe.training.parity_probe import ParityProbe
from recipe.training.recall import Recall
from recipe.training.step import Trainer

LONG = 600.0  # seconds of a run from which on it says in advance how long it takes
WARM = 1.0  # seconds of a batch below which the first one tells little


class NullRecord:
    """The record of ranks other than the first: they only write their share of checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.details: dict[str, Any] = {}  # of each probe, for the summary
        self.reached: int | None = None  # updates with which training.target_loss was reached

    def print(self, text: str) -> None:
        """A line for the user."""

    def log(self, n: int, metrics: dict[str, Any]) -> None:
        """Metrics after n updates."""

    def save(self, n: int, val_loss: float | None) -> None:
        """This rank's share of the checkpoint after n updates. The first rank knows its folder and validation loss."""
        save_checkpoint(Path(), self.trainer.state(), n, keep_last=1, metadata={})

    def __enter__(self) -> NullRecord:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """The run is over, with or without an `error`."""


class Meter(Protocol):
    """What the loop tells the measurement of step times and memory: recipe/run/meters.py."""

    def step_start(self) -> None:
        """A step begins."""

    def waiting_for_data(self) -> AbstractContextManager[None]:
        """Around a wait for batches."""

    def step_end(self) -> None:
        """The last work of a step has been launched."""

    def paused(self) -> AbstractContextManager[None]:
        """Around work that is not training."""

    def interval(self, replayed_bytes: int = 0) -> dict[str, float]:
        """Metrics of the steps since the last call."""


class Recording(Protocol):
    """A recording of some steps: recipe/run/profiler.py.

    first, last  the steps that it begins and ends with; None: it records none
    """

    first: int | None
    last: int | None

    def start(self) -> None:
        """Before the first step."""

    def stop(self) -> dict[str, float]:
        """After the last step. Returns metrics."""


@dataclass
class Run:
    """The parts of a run that is ready to train.

    batches       of this rank
    windows       batches for the validation loss
    record        of metrics and checkpoints
    interruption  by a signal
    start         updates done already
    recalls       measured with every evaluation: recall tasks, and loss by position
    mixture       of several corpora, the weight and the batches for the validation loss of each, by its name
    """

    trainer: Trainer
    batches: Source
    windows: Sequence[Batch]
    meter: Meter
    probe: ParityProbe | None
    profiler: Recording
    record: NullRecord
    interruption: Interruption
    start: int = 0
    recalls: Sequence[Recall] = ()
    mixture: Mapping[str, tuple[int, Sequence[Batch]]] = field(default_factory=dict)


def fit(run: Run) -> int:
    """Train to the end, until a signal, or to the target. Returns the updates done.

    Raises OutOfMemory, and NonFiniteError; earlier checkpoints stay.
    """
    trainer = run.trainer
    limit = trainer.training.cpu.memory_gib if trainer.device.type == "cpu" else None
    with (
        oom_guard(too_large_step(trainer)),
        Prefetcher(run.batches, trainer.device, run.start) as prefetched,
        cpu_memory_limit(limit),  # Python waits forever for a thread that lacks the memory to start
        run.interruption,
    ):
        return train_steps(run, prefetched)


def too_large_step(trainer: Trainer) -> str:
    """The sentence for a training step that does not fit."""
    model, training = trainer.model, trainer.training
    linear = "an attention whose memory is linear in seq_len (attention=flash on a GPU, tiled or sdpa), "
    return (
        f"attention={model.attend.name} with seq_len={model.seq_len} and training.batch_size={training.batch_size} "
        f"does not fit in the memory of {trainer.device}; use {linear if model.attend.name == 'naive' else ''}"
        "training.recompute=block, or a smaller training.batch_size with training.batch_tokens to keep the tokens of a "
        "step."
    )


def train_steps(run: Run, batches: Iterator[Batch]) -> int:
    """Train from `run.start` updates to `training.steps`, or until a signal or `training.target_loss`.

    Returns the updates done.

    batches  on the device, in the order of (step, micro-step) from (start, 0) on
    """
    trainer, meter, profiler = run.trainer, run.meter, run.profiler
    config = trainer.training
    announce_cost(run)
    if run.start == 0 and config.eval_every:
        with meter.paused():
            measured = evaluate(run, final=False)
        run.record.log(0, measured)
    for step in range(run.start, config.steps):
        n = step + 1  # updates done when this one is
        if step == profiler.first:
            with meter.paused():
                profiler.start()
        meter.step_start()
        with meter.waiting_for_data(), record_function("data"):
            micro_batches = [next(batches) for _ in range(trainer.micro_steps)]
        metrics = {}
        if run.probe is not None and run.probe.is_due(step):
            with meter.paused():
                metrics = compare(run.probe, trainer, step, micro_batches[0])
            meter.step_start()
        of_step = trainer.update(step, micro_batches)
        meter.step_end()
        if step == profiler.last:
            with meter.paused():
                metrics |= profiler.stop()

        every = config.log_every, config.eval_every, config.checkpoint_every
        logs, evaluates, saves = (config.is_due(steps, n) for steps in every)
        stopping = run.interruption.agreed(waits=logs or evaluates or saves)
        if not (metrics or stopping or logs or evaluates or saves):
            continue
        trainer.raise_failure()  # before these weights are measured or saved
        metrics |= {name: float(value) for name, value in of_step.items()}
        metrics |= meter.interval(trainer.replay.peak_bytes if trainer.replay else 0)
        if evaluates:
            with meter.paused():
                metrics |= evaluate(run, final=n == config.steps)
        run.record.log(n, metrics)  # counts as training time: frequent logging slows training
        reached = evaluates and config.target_loss is not None and metrics["val/loss"] <= config.target_loss
        if saves or ((stopping or reached) and config.checkpoint_every):
            with meter.paused():
                run.record.save(n, metrics.get("val/loss"))
        if reached:
            run.record.reached = n
        if stopping or reached:
            return n
    return config.steps


def announce_cost(run: Run) -> None:
    """Say how long a run on a CPU will take where that is long, from the time of one batch."""
    trainer, config, windows = run.trainer, run.trainer.training, run.windows[:1]
    steps = config.steps - run.start
    few = steps < 10 * config.log_every  # whose first line of progress says it soon enough
    if trainer.device.type != "cpu" or trainer.world.size > 1 or config.compile or few or not windows:
        return
    seconds = time_of(lambda: trainer.evaluate(windows))
    if seconds < WARM:  # the first call also sets torch up
        seconds = time_of(lambda: trainer.evaluate(windows))
    evaluations = steps // config.eval_every + 1 if config.eval_every else 0
    # A backward pass takes as long as two forward passes.
    total = seconds * (3 * steps * trainer.micro_steps + evaluations * len(run.windows))
    if total >= LONG:
        run.record.print(f"about {total / 60:,.0f} minutes for {steps:,} steps on this CPU")


def time_of(work: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def evaluate(run: Run, final: bool) -> dict[str, float]:
    """The validation loss and the metrics of `run.recalls`; after the `final` step, their details too."""
    trainer = run.trainer
    metrics = measure_mixture(run) if run.mixture else trainer.measure(run.windows)
    if not run.recalls:
        return metrics
    model = trainer.whole_model()  # every rank calls this, and the first measures
    if trainer.world.rank == 0:
        model.eval()
        with torch.no_grad(), trainer.autocast():
            for recall in run.recalls:
                metrics |= recall.measure(model)
                if final:
                    beyond, run.record.details[recall.name] = recall.details(model)
                    metrics |= beyond
        model.train()
    return metrics


def measure_mixture(run: Run) -> dict[str, float]:
    """The validation loss of each corpus, val/loss/<name>, and val/loss: their mean by weights."""
    total, metrics = sum(weight for weight, _ in run.mixture.values()), dict[str, float]()
    for name, (weight, windows) in run.mixture.items():
        for metric, loss in run.trainer.measure(windows).items():
            metrics[metric] = metrics.get(metric, 0.0) + weight / total * loss
            metrics[f"{metric}/{name}"] = loss
    return metrics


def compare(probe: ParityProbe, trainer: Trainer, step: int, batch: Batch) -> dict[str, Any]:
    """The parity probe's metrics on the step's first micro-batch, with the dropout masks of its training."""
    key, scale = trainer.dropout_key_for(step, 0), trainer.scale.item()
    return probe.measure(trainer.whole_model(), batch, key, scale)
