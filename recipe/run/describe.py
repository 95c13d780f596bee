"""What a run prints before its first step and after its last."""

import signal
from collections.abc import Iterator
from pathlib import Path

import torch

from attention.formula.describe import idle
from data.options import Documents
from data.untrusted import UntrustedError
from model.counting import num_parameters
from model.score import ScoreConfig, describe_score
from recipe.run.config import Config
from recipe.run.meters import describe_peak, device_name, product_precision
from recipe.run.run_folder import read_summary
from recipe.training.checkpoint import Manifest
from recipe.training.device import Precision
from recipe.training.loop import Run
from recipe.training.options import TrainingConfig
from recipe.training.step import Trainer


def describe_run(config: Config, trainer: Trainer, path: str | None) -> Iterator[str]:
    """A line of the run's parts, its device, and what `auto` chose; one for each part of a formula without effect, and
    one where it compiles.

    path  the kernels of its attention
    """
    yield "  ".join(_parts(config, trainer, path))
    for score in dict.fromkeys(trainer.model.scores):
        if score.formula is not None:
            yield from idle(str(score.formula), score.sinks)
    if config.training.compile:
        yield "compiling: the first steps and the first evaluation wait for it, some minutes"


def _parts(config: Config, trainer: Trainer, path: str | None) -> Iterator[str]:
    device, world, precision = trainer.device, trainer.world, trainer.training.precision
    yield f"attention={config.attention.name}" + (f" ({path} kernels)" if path else "")
    if config.score != ScoreConfig():
        yield f"score={describe_score(config.score)}"
    for window in sorted({score.window for score in trainer.model.scores if score.window}):
        if window >= config.seq_len:
            yield f"window={window} hides nothing at seq_len={config.seq_len}"
    if config.data.documents is not Documents.ignore:
        yield f"documents={config.data.documents.name}"
    yield f"model={config.model.name}: {num_parameters(trainer.model):,} parameters"
    yield f"{trainer.tokens_per_step:,} tokens per step"
    yield f"device={device}" + " (auto)" * (config.device == "auto")
    yield f"precision={precision.value}" + " (auto)" * (config.training.precision is Precision.auto)
    if device.type == "cpu":
        yield f"{torch.get_num_threads()} threads"
    if world.size > 1:
        context = f", parallel.context={world.context}" if world.context > 1 else ""
        order = ", sums in another order than one rank's" if world.size & (world.size - 1) else ""
        yield f"{world.size} ranks, parallel.data={config.parallel.data.value}{context}{order}"
    if device.type == "cuda":
        products = product_precision(precision.value, trainer.model.attend.config.allow_tf32)
        yield f"MFU of {describe_peak(device_name(device), products)}"


def describe_complete(asked: TrainingConfig, folder: Path, checkpoint: Manifest | None) -> str | None:
    """That the run in a folder, of which this is the newest checkpoint, has nothing left to do; None where it has."""
    try:
        summary = read_summary(folder)
    except (OSError, UntrustedError):
        return None
    start = 0 if checkpoint is None else checkpoint.step
    target = summary.get("config", {}).get("training", {}).get("target_loss")
    at_target = summary.get("target") is not None and target == asked.target_loss
    if start < asked.steps and not at_target:
        return None
    more = f"has {start} steps already, more than {asked.steps}"
    state = more if start > asked.steps else f"is complete with {start} steps"
    return f"{folder} {state}; training.steps={2 * start} would continue it."


def describe_end(run: Run, done: int, folder: Path) -> str | None:
    """Why a run ended after `done` updates, before its last: its target, or a signal, and then how it goes on."""
    training, number = run.trainer.training, run.interruption.number
    if run.record.reached is not None:
        return (
            f"reached training.target_loss={training.target_loss} after step {done}: "
            f"{done * run.trainer.tokens_per_step:,} tokens"
        )
    if done == training.steps or number is None:
        return None
    go_on = f"resume={folder} goes on" if training.checkpoint_every else "training.checkpoint_every=0 saved nothing"
    return f"stopped by {signal.Signals(number).name} after step {done} of {training.steps}; {go_on}"
