"""In-context linear regression: points on a line that is drawn anew for each sequence, in tokens.

    x1 y1 x2 y2 x3 ?        y = a x + b, rounded

Garg et al. 2022, "What Can Transformers Learn In-Context?", in one dimension. Two points give the line, up to rounding.
"""

from __future__ import annotations

import numpy as np

from data.tasks.task import IGNORED, Draws, Sequence, Task


class LinearRegression(Task):
    """x is one of BINS values in [-1, 1]; a and b are drawn from [-1, 1], and y is rounded to BINS values in [-2, 2].

    The targets are the y of the second half; the distance is the one to the point with the nearest x.
    """

    name = "regression"
    source = "Garg et al. 2022, What Can Transformers Learn In-Context?"
    BINS = 32
    vocab_size = 2 * BINS

    @property
    def chance(self) -> float:
        return 1 / self.BINS

    def sequence(self, draws: Draws, T: int) -> Sequence:
        n, steps = T // 2, 2**20
        slope, offset = 2 * draws.below(steps, 2) / (steps - 1) - 1
        x = draws.below(self.BINS, n)
        y = slope * (2 * x / (self.BINS - 1) - 1) + offset
        answers = np.rint((y + 2) / 4 * (self.BINS - 1)).astype(np.int64)
        inputs, targets, distance = np.zeros(T, np.int64), np.full(T, IGNORED), np.zeros(T, np.int64)
        inputs[0 : 2 * n : 2], inputs[1 : 2 * n : 2] = x, self.BINS + answers
        for point in range(n // 2, n):
            targets[2 * point] = self.BINS + answers[point]
            nearest = point - 1 - int(np.argmin(np.abs(x[:point] - x[point])[::-1]))
            distance[2 * point] = 2 * point - (2 * nearest + 1)
        return Sequence(inputs, targets, distance)
