"""The interface of a task: sequences that follow from a number, in which some tokens are to be predicted.

Every draw comes from the raw output of Philox, which is the same on every platform and in every version of numpy. So a
sequence is a pure function of (seed, split, number), like everything in a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FORMAT = 3  # increase it when the same numbers give other sequences
IGNORED = -100  # the target where nothing is to be predicted; the loss leaves it out


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
    min_seq_len  the shortest sequence that it fits
    """

    name: str
    source: str
    vocab_size: int
    min_seq_len: int = 32

    @property
    @abstractmethod
    def chance(self) -> float:
        """The accuracy of guessing among all answers."""

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
