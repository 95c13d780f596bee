"""Counting: how often the current letter has come in a row.

    a a a b a a b b        answers: 1 2 3 1 1 2 1 2

Bhattamishra et al. 2020, "On the Ability and Limitations of Transformers to Recognize Formal Languages": without
positions, equal tokens have equal outputs, however many there are, since a softmax averages. One layer without
positions does not see the order of the tokens before either: `a b b` and `b a b` are one to it.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task


class Counting(Task):
    """Runs of 1 to LONGEST equal letters, a and b in turn, so that how many there are of each says little about the
    last run. Token LETTERS + n is the count n + 1. The targets are at the ends of the last T / LONGEST runs; the
    distance is that to the first letter of the run."""

    name = "counting"
    source = "Bhattamishra et al. 2020, On the Ability and Limitations of Transformers to Recognize Formal Languages"
    LETTERS, LONGEST = 2, 8
    vocab_size = LETTERS + LONGEST
    chance = 1 / LONGEST

    def sequence(self, draws: Draws, T: int) -> Sequence:
        # Drawn from the last run, which ends with the sequence, to the first, which is cut.
        counts = 1 + draws.below(self.LONGEST, T)
        letters = (draws.below(self.LETTERS, 1) + np.arange(T)) % self.LETTERS
        inputs = np.repeat(letters, counts)[:T][::-1]
        asked = counts[: T // self.LONGEST]
        ends = T - 1 - (np.cumsum(asked) - asked)
        targets, distance = np.full(T, IGNORED), np.zeros(T, np.int64)
        targets[ends], distance[ends] = self.LETTERS + asked - 1, asked - 1
        return Sequence(inputs, targets, distance)
