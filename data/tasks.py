"""Tasks that test abilities of an attention: generators of sequences whose right answers are known, and their batches.

Every draw comes from the raw output of Philox, which is the same on every platform and in every version of numpy. So a
sequence is a pure function of (seed, split, number), like everything in a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.batches import Batch, GlobalBatch, Source, from_arrays
from data.errors import DataError

FORMAT = 3  # increase it when the same numbers give other sequences
IGNORED = -100  # the target where nothing is to be predicted; the loss leaves it out
# Sequences are drawn from (seed, split, length, number): so validation sequences are never trained on, and are the same
# in every run.
TRAINING, VALIDATION = 0, 1
VALIDATION_SEED = 0
SHARE = 16  # tokens of the sequence for each pair of mqar, and for each question of needle


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


def asking(
    inputs: np.ndarray, places: np.ndarray | slice, answers: np.ndarray, distances: np.ndarray | int
) -> Sequence:
    """The sequence of these inputs that asks for answers at some places, so far behind what determines them."""
    targets, distance = np.full(len(inputs), IGNORED), np.zeros(len(inputs), np.int64)
    targets[places], distance[places] = answers, distances
    return Sequence(inputs, targets, distance)


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
    vocab_size   of its tokens
    chance       the accuracy of guessing among all answers
    min_seq_len  the shortest sequence that it fits
    """

    name: str
    vocab_size: int
    chance: float
    min_seq_len: int = 32

    @abstractmethod
    def sequence(self, draws: Draws, T: int) -> Sequence:
        """A sequence of T tokens, with a number of targets that depends on T alone."""


class AssociativeRecall(Task):
    """Multi-query associative recall: pairs of a key and a value, then keys whose values are to be recalled.

        k3 v7 k1 v2 k9 v9 . . k1 ? . k9 ? . . k3 ?

    Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models". Full attention solves it;
    an attention that does not see the pair cannot.

    Keys 1 to KEYS, values after them; 0 fills the gaps. A sequence of T tokens holds T / 16 pairs, all KEYS at most,
    and half of the places behind them ask for one.

    With few keys, two layers learn it within some hundred thousand answers; with 64, not within 900 thousand.
    """

    name = "mqar"
    KEYS = VALUES = 16
    vocab_size = 1 + KEYS + VALUES
    chance = 1 / VALUES

    def sequence(self, draws: Draws, T: int) -> Sequence:
        n = min(T // SHARE, self.KEYS)
        keys, values = 1 + draws.some_of(self.KEYS, n), 1 + self.KEYS + draws.below(self.VALUES, n)
        inputs = np.zeros(T, np.int64)
        inputs[: 2 * n : 2], inputs[1 : 2 * n : 2] = keys, values
        # Each query is followed by its value, as in a text; so a slot takes two tokens. Half of the slots are used.
        free = (T - 2 * n) // 2
        slots = 2 * n + 2 * np.sort(draws.some_of(free, free // 2))
        asked = draws.below(n, len(slots))
        inputs[slots], inputs[slots + 1] = keys[asked], values[asked]
        return asking(inputs, slots, values[asked], slots - (2 * asked + 1))


class Induction(Task):
    """Induction: random tokens that repeat with some period, so that what followed a token before follows it again.

        a q c f a q c f a q ?

    Olsson et al. 2022, "In-context Learning and Induction Heads". Two layers of attention solve it, one cannot.

    The period lies between T / 8 and T / 2; the targets are the tokens of the second half.
    """

    name = "induction"
    vocab_size = 64
    chance = 1 / vocab_size

    def sequence(self, draws: Draws, T: int) -> Sequence:
        half = T // 2
        period = T // 8 + int(draws.below(half - T // 8, 1)[0])
        tokens = np.resize(draws.below(self.vocab_size, period), T + 1)
        return asking(tokens[:T], slice(half, T), tokens[half + 1 :], period - 1)


class Needle(Task):
    """A needle in a haystack: one special token among random ones, which later questions ask for.

        x f r N q z ? f a x ? m ?        answers: N

    Kamradt 2023, "Needle in a Haystack"; Mohtashami and Jaggi 2023, "Landmark Attention", ask for a pass key in this
    way. The accuracy by length and distance is the usual heat map.

    0 asks; the needle is one of NEEDLES tokens, the hay of the tokens after them. The needle lies in the first half,
    and T / 16 questions behind it, the last at the end.
    """

    name = "needle"
    NEEDLES = HAY = 64
    vocab_size = 1 + NEEDLES + HAY
    chance = 1 / NEEDLES

    def sequence(self, draws: Draws, T: int) -> Sequence:
        inputs, place = 1 + self.NEEDLES + draws.below(self.HAY, T), int(draws.below(T // 2, 1)[0])
        questions = place + 1 + draws.some_of(T - 1 - place, T // SHARE)
        if T - 1 not in questions:
            questions[-1] = T - 1
        inputs[place], inputs[questions] = 1 + int(draws.below(self.NEEDLES, 1)[0]), 0
        return asking(inputs, questions, inputs[place], questions - place)


class Counting(Task):
    """Counting: how often the current letter has come in a row.

        a a a b a a b b        answers: 1 2 3 1 1 2 1 2

    Bhattamishra et al. 2020, "On the Ability and Limitations of Transformers to Recognize Formal Languages": without
    positions, equal tokens have equal outputs, however many there are, since a softmax averages. One layer without
    positions does not see the order of the tokens before either: `a b b` and `b a b` are one to it.

    Runs of 1 to LONGEST equal letters, a and b in turn, so that how many there are of each says little about the
    last run. Token LETTERS + n is the count n + 1. The targets are at the ends of the last T / LONGEST runs; the
    distance is that to the first letter of the run.
    """

    name = "counting"
    LETTERS, LONGEST = 2, 8
    vocab_size = LETTERS + LONGEST
    chance = 1 / LONGEST

    def sequence(self, draws: Draws, T: int) -> Sequence:
        # Drawn from the last run, which ends with the sequence, to the first, which is cut.
        counts = 1 + draws.below(self.LONGEST, T)
        letters = (draws.below(self.LETTERS, 1) + np.arange(T)) % self.LETTERS
        inputs = np.repeat(letters, counts)[:T][::-1]
        asked = counts[: T // self.LONGEST]
        return asking(inputs, T - 1 - (np.cumsum(asked) - asked), self.LETTERS + asked - 1, asked - 1)


TASKS: dict[str, Task] = {task.name: task for task in (AssociativeRecall(), Induction(), Needle(), Counting())}


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


def drawn(task: Task, T: int, seed: int, split: int, numbers: Iterable[int]) -> list[Sequence]:
    """The sequences of these numbers."""
    return [task.sequence(Draws(seed, split, T, number), T) for number in numbers]


def stored(sequences: list[Sequence]) -> Batch:
    """Sequences as a micro-batch."""
    inputs, targets, _ = zip(*sequences, strict=True)
    return from_arrays(np.stack(inputs).astype(np.int16), np.stack(targets).astype(np.int16))


class TaskBatches(Source):
    """The training batches of one rank. No sequence comes twice.

    Raises DataError for sequences that are too short for the task.
    """

    def __init__(self, task: Task, seq_len: int, global_batch: GlobalBatch, seed: int) -> None:
        check_length(task, seq_len)
        self.task, self.seq_len, self.global_batch, self.seed = task, seq_len, global_batch, seed

    def stored_of(self, sequences: np.ndarray) -> Batch:
        return stored(drawn(self.task, self.seq_len, self.seed, TRAINING, sequences.tolist()))


def validation_batches(task: Task, seq_len: int, batch_size: int, count: int) -> list[Batch]:
    """`count` batches of validation, the same in every run."""
    numbers = (range(n * batch_size, (n + 1) * batch_size) for n in range(count))
    return [stored(drawn(task, seq_len, VALIDATION_SEED, VALIDATION, batch)).widened() for batch in numbers]


def check_length(task: Task, seq_len: int, option: str = "data") -> None:
    """Raise DataError for sequences that are too short for the task."""
    if seq_len < task.min_seq_len:
        raise DataError(
            f"{option}={task.name} needs seq_len={task.min_seq_len} or more, and seq_len={seq_len} is less."
        )
