"""Several corpora in one run: data.path=[a,b] data.weights=[3,1].

The sequences of a run repeat a pattern of sum(weights) corpora, here a a b a, in which each corpus is spread evenly.
Each corpus counts its own sequences, so which tokens a step has depends on the seed and the step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from data.batches import Batches, Stored


class MixedBatches:
    """The training batches of one rank, from several texts.

    parts    of each text, with the same sequences in a step
    weights  of each text: sequences in a period of the pattern
    """

    def __init__(self, parts: Sequence[Batches], weights: Sequence[int]) -> None:
        self.parts, self.weights, self.global_batch = parts, np.array(weights), parts[0].global_batch
        self.pattern = np.array(pattern(weights))
        # For each place of the pattern, how often its corpus stands before it.
        self.before = np.array([np.sum(self.pattern[:n] == corpus) for n, corpus in enumerate(self.pattern)])

    def stored(self, step: int, micro_step: int = 0) -> Stored:
        """The micro-batch as it is stored."""
        periods, places = np.divmod(self.global_batch.numbers(step, micro_step), len(self.pattern))
        corpora = self.pattern[places]
        numbers = periods * self.weights[corpora] + self.before[places]
        rows = [self.parts[corpus].stored_of(numbers[n : n + 1]) for n, corpus in enumerate(corpora)]
        starts = [row.document_starts for row in rows if row.document_starts is not None]
        return Stored(
            np.concatenate([row.window for row in rows]),
            document_starts=np.concatenate(starts) if starts else None,
        )


def pattern(weights: Sequence[int]) -> list[int]:
    """The corpora of one period, by their numbers: the k-th sequence of a corpus stands at (k + 1/2) / weight."""
    places = [(Fraction(2 * k + 1, 2 * weight), n) for n, weight in enumerate(weights) for k in range(weight)]
    return [n for _, n in sorted(places)]
