"""The interface of a task: sequences that follow from a number, in which some tokens are to be predicted; its batches.

Every draw comes from the raw output of Philox, which is the same on every platform and in every version of numpy. So a
sequence is a pure function of (seed, split, number), like everything in a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.batches import Batch, GlobalBatch, Stored
from data.errors import DataError

FORMAT = 3  # increase it when the same numbers give other sequences
IGNORED = -100  # the target where nothing is to be predicted; the loss leaves it out
# Sequences are drawn from (seed, split, length, number): so validation sequences are never trained on, and are the same
# in every run.
TRAINING, VALIDATION = 0, 1
VALIDATION_SEED = 0


class Sequence(NamedTuple):
    """One sequence of a task.

    inputs    (T,) int64
    targets   (T,) int64, IGNORED where nothing is to be predicted
    distance  (T,) int64: the number of tokens from the one that determines the target to the input; 0 where nothing is
              to be predicted
    """

    inputs: np.ndarray
    targets: np.ndarray
    distance: np.ndarray


class Draws:
    """Random numbers of one sequence."""

    def __init__(self, *key: int) -> None:
        self.philox = np.random.Philox(np.random.SeedSequence(key))

    def below(self, limit: int, n: int) -> np.ndarray:
        """n integers from 0 to limit - 1, with a bias of at most limit / 2^64."""
        return (self.philox.random_raw(n) % np.uint64(limit)).astype(np.int64)

    def some_of(self, limit: int, n: int) -> np.ndarray:
        """n different integers from 0 to limit - 1, in random order."""
        return np.argsort(self.philox.random_raw(limit), kind="stable")[:n]


class Task(ABC):
    """A generator of sequences.

    name         as in data=<name>
    source       the paper that it comes from
    vocab_size   of its tokens
    chance       the accuracy of guessing among all answers
    min_seq_len  the shortest sequence that it fits
    """

    name: str
    source: str
    vocab_size: int
    chance: float
    min_seq_len: int = 32

    @abstractmethod
    def sequence(self, draws: Draws, T: int) -> Sequence:
        """A sequence of T tokens, with a number of targets that depends on T alone."""


@dataclass(frozen=True)
class TaskData:
    """The data of a run that trains on a task: nothing is prepared."""

    task: Task

    @property
    def vocab_size(self) -> int:
        return self.task.vocab_size

    @property
    def identity(self) -> str:
        """Equal for equal sequences."""
        return f"{self.task.name}-{FORMAT}"


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


def validation_batches(task: Task, seq_len: int, batch_size: int, count: int) -> list[Batch]:
    """`count` batches of validation, the same in every run."""
    check_length(task, seq_len)
    numbers = (range(n * batch_size, (n + 1) * batch_size) for n in range(count))
    return [stored(drawn(task, seq_len, VALIDATION_SEED, VALIDATION, batch)).batch() for batch in numbers]


def check_length(task: Task, seq_len: int) -> None:
    """Raise DataError for sequences that are too short for the task."""
    if seq_len < task.min_seq_len:
        raise DataError(f"data={task.name} needs seq_len={task.min_seq_len} or more, and seq_len={seq_len} is less.")
