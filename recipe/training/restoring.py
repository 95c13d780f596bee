"""A trainer continues from a checkpoint, if its text and the size of its steps are still the same."""

from pathlib import Path
from typing import Any

from recipe.training.checkpoint import CheckpointError, Manifest
from recipe.training.step import Trainer


def restore(trainer: Trainer, checkpoint: Manifest, name: str, identity: str) -> None:
    """Load a checkpoint. Raises CheckpointError.

    name, identity  of the run's data
    """
    if checkpoint.metadata["data"] != identity:
        raise CheckpointError(
            f"The text of data={name} has changed since {checkpoint.path}; start a new run without resume."
        )
    check_step_size(trainer, checkpoint.metadata, checkpoint.path)
    trainer.load(checkpoint.path)


def check_step_size(trainer: Trainer, metadata: dict[str, Any], path: Path) -> None:
    """Refuse steps whose size has changed with the number of ranks alone. Raises CheckpointError."""
    then, now, training = metadata.get("tokens_per_step"), trainer.tokens_per_step, trainer.training
    unchanged = training.batch_tokens is None and training.batch_size == metadata["config"]["training"]["batch_size"]
    if then is not None and then != now and unchanged:
        raise CheckpointError(
            f"{path} was trained with {then} tokens per step, and {trainer.world.size} ranks of "
            f"training.batch_size={training.batch_size} have {now}; set training.batch_tokens={then} with a "
            f"training.batch_size that divides it to keep it, or training.batch_tokens={now} to continue with these."
        )
