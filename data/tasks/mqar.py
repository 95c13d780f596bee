"""Multi-query associative recall: pairs of a key and a value, then keys whose values are to be recalled.

    k3 v7 k1 v2 k9 v9 . . k1 ? . k9 ? . . k3 ?

Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models". Full attention solves it; an
attention that does not see the pair cannot.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task

PAIR_SHARE = 16  # tokens of the sequence for each pair


class AssociativeRecall(Task):
    """Keys 1 to KEYS, values after them; 0 fills the gaps. A sequence of T tokens holds T / 16 pairs, all KEYS at most,
    and half of the places behind them ask for one.

    With few keys, two layers learn it within some hundred thousand answers; with 64, not within 900 thousand.
    """

    name = "mqar"
    source = "Arora et al. 2023, Zoology"
    KEYS = VALUES = 16
    vocab_size = 1 + KEYS + VALUES
    chance = 1 / VALUES

    def sequence(self, draws: Draws, T: int) -> Sequence:
        n = min(T // PAIR_SHARE, self.KEYS)
        keys, values = 1 + draws.some_of(self.KEYS, n), 1 + self.KEYS + draws.below(self.VALUES, n)
        inputs, targets = np.zeros(T, np.int64), np.full(T, IGNORED)
        distance = np.zeros(T, np.int64)
        inputs[0 : 2 * n : 2], inputs[1 : 2 * n : 2] = keys, values
        # Each query is followed by its value, as in a text; so a slot takes two tokens. Half of the slots are used.
        free = (T - 2 * n) // 2
        slots = 2 * n + 2 * np.sort(draws.some_of(free, free // 2))
        asked = draws.below(n, len(slots))
        inputs[slots], inputs[slots + 1] = keys[asked], values[asked]
        targets[slots], distance[slots] = values[asked], slots - (2 * asked + 1)
        return Sequence(inputs, targets, distance)
