"""Selective copying: some tokens among blanks, to be repeated in order and without the blanks.

    . b . . a . . b . > > >        answers: b a b

Jing et al. 2019, "Gated Orthogonal Recurrent Units"; Gu and Dao 2023, "Mamba", section 3.1.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task

SHARE = 16  # tokens of the sequence for each token to copy


class SelectiveCopy(Task):
    """0 is a blank, 1 asks for the next token; T / 16 tokens are copied."""

    name = "selective_copy"
    source = "Gu and Dao 2023, Mamba"
    LETTERS = 16
    vocab_size = 2 + LETTERS

    @property
    def chance(self) -> float:
        return 1 / self.LETTERS

    def sequence(self, draws: Draws, T: int) -> Sequence:
        n = T // SHARE
        places, letters = np.sort(draws.some_of(T - n, n)), 2 + draws.below(self.LETTERS, n)
        inputs, targets, distance = np.zeros(T, np.int64), np.full(T, IGNORED), np.zeros(T, np.int64)
        inputs[places], inputs[T - n :] = letters, 1
        targets[T - n :], distance[T - n :] = letters, np.arange(T - n, T) - places
        return Sequence(inputs, targets, distance)
