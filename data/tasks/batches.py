"""The batches of a task, drawn as they are needed: a pure function of (seed, step, micro-step, rank)."""

from __future__ import annotations

import numpy as np

from data.batches import Batch, GlobalBatch, Stored
from data.errors import DataError
from data.tasks.task import Draws, Sequence, Task

# Sequences are drawn from (seed, split, length, number): so validation sequences are never trained on, and are the same
# in every run.
TRAINING, VALIDATION = 0, 1
VALIDATION_SEED = 0


def drawn(task: Task, T: int, seed: int, split: int, numbers: range) -> list[Sequence]:
    """The sequences of these numbers."""
    return [task.sequence(Draws(seed, split, T, number), T) for number in numbers]


def stored(sequences: list[Sequence]) -> Stored:
    """Sequences as a micro-batch."""
    inputs, targets = (np.stack(parts).astype(np.int16) for parts in zip(*(s[:2] for s in sequences), strict=True))
    return Stored(inputs, targets)


class TaskBatches:
    """The training batches of one rank. No sequence comes twice.

    Raises DataError for sequences that are too short for the task.
    """

    def __init__(self, task: Task, seq_len: int, global_batch: GlobalBatch, seed: int) -> None:
        check_length(task, seq_len)
        self.task, self.seq_len, self.global_batch, self.seed = task, seq_len, global_batch, seed

    def stored(self, step: int, micro_step: int = 0) -> Stored:
        """The micro-batch as it is stored."""
        first = step * self.global_batch.sequences + self.global_batch.first_sequence(micro_step)
        numbers = range(first, first + self.global_batch.batch_size)
        return stored(drawn(self.task, self.seq_len, self.seed, TRAINING, numbers))

    def pieces(self) -> list[int]:
        """Each row is one piece."""
        return [self.seq_len] * self.global_batch.batch_size


def validation_batches(task: Task, seq_len: int, batch_size: int, count: int) -> list[Batch]:
    """`count` batches of validation, the same in every run."""
    check_length(task, seq_len)
    numbers = (range(n * batch_size, (n + 1) * batch_size) for n in range(count))
    return [stored(drawn(task, seq_len, VALIDATION_SEED, VALIDATION, batch)).batch() for batch in numbers]


def check_length(task: Task, seq_len: int) -> None:
    """Raise DataError for sequences that are too short for the task."""
    if seq_len < task.min_seq_len:
        raise DataError(f"data={task.name} needs seq_len={task.min_seq_len} or more, and seq_len={seq_len} is less.")
