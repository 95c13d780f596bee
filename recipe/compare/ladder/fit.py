"""A law of the loss over compute, and its prediction of the next size with an interval.

L(C) = E + A C^-alpha, as in Hoffmann et al. 2022 ("Training Compute-Optimal Large Language Models"), over the compute
of the runs alone. For a given alpha it is linear, so the fit has one minimum to search, by scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

ALPHAS = (0.02, 2.0)  # between them the exponent is searched
RESAMPLES = 999
CONFIDENCE = 0.95


class Law(NamedTuple):
    """L(C) = floor + factor (C / unit)^-alpha."""

    floor: float
    factor: float
    alpha: float
    unit: float

    def __call__(self, compute: ArrayLike) -> Any:
        return self.floor + self.factor * (np.asarray(compute, np.float64) / self.unit) ** -self.alpha


class Prediction(NamedTuple):
    """The loss that a law gives at some compute, with its 95 % interval."""

    loss: float
    low: float
    high: float


def fit_law(compute: ArrayLike, losses: ArrayLike) -> Law:
    """The law through mean losses at some compute, by least squares."""
    C, y = np.asarray(compute, np.float64), np.asarray(losses, np.float64)
    unit = float(stats.gmean(C))

    def line(alpha: float) -> Law:
        x = (C / unit) ** -alpha
        factor = np.dot(x - x.mean(), y) / np.sum((x - x.mean()) ** 2)
        return Law(float(y.mean() - factor * x.mean()), float(factor), float(alpha), unit)

    best = optimize.minimize_scalar(lambda alpha: np.sum((line(alpha)(C) - y) ** 2), bounds=ALPHAS, method="bounded")
    return line(best.x)


def predict(compute: Sequence[float], losses: Sequence[Sequence[float]], next_compute: float) -> Prediction:
    """The mean loss at `next_compute` of as many seeds as each size has, at least two.

    The interval has three parts: the law's uncertainty, by a bootstrap over the seeds of each size; the distance of the
    sizes from the law; and the standard error of a mean over seeds.

    losses  of each size, by seed
    """
    means = np.array([np.mean(seeds) for seeds in losses])
    law = fit_law(compute, means)

    def at_next(*seeds: NDArray[np.float64]) -> float:
        return float(fit_law(compute, [np.mean(size) for size in seeds])(next_compute))

    resampled = stats.bootstrap(
        tuple(np.asarray(seeds) for seeds in losses), at_next, vectorized=False, n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    residual = np.sum((law(compute) - means) ** 2) / (len(means) - 3)
    seeds = np.mean([np.var(size, ddof=1) / len(size) for size in losses])
    scatter = np.random.default_rng(1).normal(0.0, np.sqrt(residual + seeds), RESAMPLES)
    low, high = np.quantile(resampled.bootstrap_distribution + scatter, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Prediction(float(law(next_compute)), float(low), float(high))
