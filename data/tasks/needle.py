"""A needle in a haystack: one special token among random ones, which later questions ask for.

    x f r N q z ? f a x ? m ?        answers: N

Kamradt 2023, "Needle in a Haystack"; Mohtashami and Jaggi 2023, "Landmark Attention", ask for a pass key in this way.
The accuracy by length and distance is the usual heat map.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task

SHARE = 16  # tokens of the sequence for each question


class Needle(Task):
    """0 asks; the needle is one of NEEDLES tokens, the hay of the tokens after them. The needle lies in the first half,
    and T / 16 questions behind it, the last at the end."""

    name = "needle"
    source = "Kamradt 2023, Needle in a Haystack"
    NEEDLES, HAY = 64, 64
    vocab_size = 1 + NEEDLES + HAY
    chance = 1 / NEEDLES

    def sequence(self, draws: Draws, T: int) -> Sequence:
        inputs, targets = 1 + self.NEEDLES + draws.below(self.HAY, T), np.full(T, IGNORED)
        distance, place = np.zeros(T, np.int64), int(draws.below(T // 2, 1)[0])
        questions = place + 1 + draws.some_of(T - 1 - place, T // SHARE)
        questions[-1] = T - 1 if T - 1 not in questions else questions[-1]
        inputs[place], inputs[questions] = 1 + int(draws.below(self.NEEDLES, 1)[0]), 0
        targets[questions], distance[questions] = inputs[place], questions - place
        return Sequence(inputs, targets, distance)
