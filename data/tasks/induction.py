"""Induction: random tokens that repeat with some period, so that what followed a token before follows it again.

    a q c f a q c f a q ?

Olsson et al. 2022, "In-context Learning and Induction Heads". Two layers of attention solve it, one cannot.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task


class Induction(Task):
    """The period lies between T / 8 and T / 2; the targets are the tokens of the second half."""

    name = "induction"
    source = "Olsson et al. 2022, In-context Learning and Induction Heads"
    vocab_size = 64
    chance = 1 / vocab_size

    def sequence(self, draws: Draws, T: int) -> Sequence:
        half = T // 2
        period = T // 8 + int(draws.below(half - T // 8, 1)[0])
        tokens = np.resize(draws.below(self.vocab_size, period), T + 1)
        targets, distance = np.full(T, IGNORED), np.zeros(T, np.int64)
        targets[half:], distance[half:] = tokens[half + 1 :], period - 1
        return Sequence(tokens[:T], targets, distance)
