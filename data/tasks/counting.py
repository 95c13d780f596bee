"""Counting: how often the current token has occurred so far.

    a b a c b a        answers: 1 1 2 1 2 3

Yehudai et al. 2024, "When Can Transformers Count to n?". A softmax averages: without positions it can compute the share
of a token among the tokens before, but not their number.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task

SHARE = 8  # occurrences of a letter, on average


class Counting(Task):
    """T / 8 letters, so that the counts of longer sequences are no larger. Token LETTERS + n is the count n + 1; the
    largest also stands for those above it. The targets are in the second half."""

    name = "counting"
    source = "Yehudai et al. 2024, When Can Transformers Count to n?"
    LETTERS, COUNTS = 128, 32
    vocab_size = LETTERS + COUNTS

    @property
    def chance(self) -> float:
        return 1 / (2 * SHARE)  # of a count that is about uniform up to twice the average

    def sequence(self, draws: Draws, T: int) -> Sequence:
        letters = draws.some_of(self.LETTERS, max(2, min(T // SHARE, self.LETTERS)))
        inputs = letters[draws.below(len(letters), T)]
        earlier = inputs[:, None] == inputs[None, :]
        counts = np.tril(earlier).sum(1)
        first = earlier.argmax(1)
        targets, distance, half = np.full(T, IGNORED), np.zeros(T, np.int64), T // 2
        targets[half:] = self.LETTERS + np.minimum(counts[half:], self.COUNTS) - 1
        distance[half:] = np.arange(half, T) - first[half:]
        return Sequence(inputs, targets, distance)
