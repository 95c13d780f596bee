"""The statistics of arms and of edits that are compared over paired seeds, with scipy's distributions and tests.

An arm and the baseline train with the same seeds: same batches, same masks and, where shapes agree, same initial
weights. Their differences seed by seed are the sample of a paired t-test.

Looking again after more seeds would raise the chance of a false verdict. So the looks are planned, and each spends an
equal share of ALPHA (Bonferroni): with two looks, each judges at ALPHA / 2, whatever the number of seeds at either.
Holm's correction (1979) does the same for several arms.

The referee looks after each pair, and judges one edit after the other, without an end. Its evidence is an e-value:
under the null hypothesis it is at most 1 on average, whenever one stops. An edit is kept where the evidence reaches a
limit that rises with the number of edits (e-LOND, Xu & Ramdas 2024, which needs no independence). So of what is kept at
most ALPHA is false on average; where nothing is real, at most ALPHA of all nights keep anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special, stats

ALPHA = 0.05  # the chance of a false better or worse, over all arms and looks
OUTLIER = 0.01  # the chance that normal differences are called skewed
POWER = 0.9  # the chance to detect an effect as large as the margin
MOST_SEEDS = 1000  # beyond this, no number of seeds is suggested
RESAMPLES = 2**16  # every assignment of signs up to 16 seeds
MOST_PAIRS = 24  # of an edit
FUTILE = 0.25  # deviations: an edit whose mean gain is smaller is dropped, which costs power and no error
EFFECT = 4.0  # variance of a gain over a pair's deviation, as expected of an edit that is better
FREEDOM = 30.0  # most degrees of freedom of a calibration
TRUST = math.log(50.0)  # the evidence without a calibration from which on the calibrated one counts


class Verdict(Enum):
    """The verdict on an arm from its seeds."""

    better = "better"
    worse = "worse"
    equivalent = "equivalent"
    undecided = "undecided"


class Paired(NamedTuple):
    """Differences to the baseline over n seeds: their mean, their deviation, and the p-value of a paired t-test.

    Numbers, or arrays where several sets of differences were given.
    """

    n: int
    mean: Any
    deviation: Any
    p: Any

    def interval(self, alpha: float) -> tuple[Any, Any]:
        """The bounds of the paired t interval with a confidence of 1 - alpha."""
        half = stats.t.isf(alpha / 2, self.n - 1) * self.deviation / np.sqrt(self.n)
        return self.mean - half, self.mean + half


def paired(differences: ArrayLike) -> Paired:
    """The paired t-test of finite differences (..., n): arm - baseline, one for each of n >= 2 seeds."""
    d = np.asarray(differences, np.float64)
    n = d.shape[-1]
    if n < 2:
        raise ValueError("a deviation needs two differences")
    mean, deviation = d.mean(-1), d.std(-1, ddof=1) * (np.ptp(d, axis=-1) > 0)
    t = np.abs(mean) * np.sqrt(n) / np.maximum(deviation, 1e-300)  # of equal differences: 0, or beyond all doubt
    return Paired(n, mean, deviation, 2 * stats.t.sf(t, n - 1))


def paired_if_several(differences: Sequence[float]) -> Paired | None:
    """The test of two differences or more; None of fewer."""
    return paired(differences) if len(differences) > 1 else None


def outlier(differences: Sequence[float], margin: float, alpha: float = ALPHA) -> int | None:
    """The place of the difference that lies too far from the others for a normal sample (Grubbs 1969, at 1 %). None
    where it does not matter: where the interval at 1 - alpha, with that difference, lies inside the margin."""
    d, n = np.asarray(differences, np.float64), len(differences)
    if n < 3 or np.ptp(d) == 0:
        return None
    distance = np.abs(d - d.mean()) / d.std(ddof=1)
    t = stats.t.isf(OUTLIER / (2 * n), n - 2)
    far = int(distance.argmax())
    if distance[far] <= (n - 1) * t / np.sqrt(n * (n - 2 + t**2)):
        return None
    return None if judge(paired(d).interval(alpha), margin) is Verdict.equivalent else far


def sign_flip(differences: ArrayLike) -> float:
    """The p-value of the sign-flip permutation test: how many assignments of signs give a mean as far from 0.

    Exact up to 16 seeds (Fisher 1935, "The Design of Experiments", section 21), else from RESAMPLES random ones.
    """
    d = np.asarray(differences, np.float64)
    if not d.any():
        return 1.0
    return float(stats.permutation_test((d,), np.mean, permutation_type="samples", n_resamples=RESAMPLES, rng=0).pvalue)


def signed_rank(differences: ArrayLike) -> float:
    """The p-value of Wilcoxon's signed-rank test. Differences may be infinite, for runs that diverged."""
    d = np.asarray(differences, np.float64)
    if not d.any():
        return 1.0
    beyond = 2 * np.abs(d[np.isfinite(d)]).max(initial=1.0)  # only its rank counts
    return float(stats.wilcoxon(np.nan_to_num(d, posinf=beyond, neginf=-beyond)).pvalue)


def holm_levels(p_values: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """The level at which Holm's step-down procedure judges each hypothesis: it is rejected where p <= level.

    The smallest of m p-values is judged at alpha / m, the next at alpha / (m - 1), and so on; from the first that is
    not rejected, the others are judged at the same level and are not rejected either.
    """
    m = len(p_values)
    levels, stopped = [0.0] * m, None
    for rank, index in enumerate(sorted(range(m), key=p_values.__getitem__)):
        levels[index] = stopped or alpha / (m - rank)
        if stopped is None and p_values[index] > levels[index]:
            stopped = levels[index]
    return levels


def judge(interval: tuple[float, float], margin: float) -> Verdict:
    """The verdict from the interval of a difference in loss: lower is better, and inside the margin is equivalent.

    An interval inside the margin shows that whatever difference there is does not matter, also where it excludes 0.
    """
    low, high = interval
    if -margin <= low and high <= margin:
        return Verdict.equivalent
    if high < 0:
        return Verdict.better
    return Verdict.worse if low > 0 else Verdict.undecided


def power_to_equate(margin: float, deviation: float, n: int, alpha: float) -> float:
    """At least this is the chance that the interval at 1 - alpha lies inside the margin, if the arms are equal.

    Two one-sided tests (Schuirmann 1987), each with the same chance to pass. That chance is higher, and a difference of
    the margin is found with at least that one.
    """
    critical, shift = stats.t.isf(alpha / 2, n - 1), margin * np.sqrt(n) / deviation
    return max(0.0, 2 * float(stats.nct.sf(critical, n - 1, shift)) - 1)


def seeds_needed(margin: float, deviation: float, alpha: float, least: int = 2) -> int | None:
    """The fewest seeds, at least `least`, that decide with a power of POWER: they find a difference of the margin, and
    they show equal arms to be equivalent. None beyond MOST_SEEDS."""
    if deviation == 0:
        return least
    for n in range(least, MOST_SEEDS + 1):
        if power_to_equate(margin, deviation, n, alpha) >= POWER:
            return n
    return None


def seeds_to_decide(test: Paired, margin: float, alpha: float) -> int | None:
    """The number of seeds to use after an undecided test: enough for a power of POWER and, if mean and
    deviation stay as they are, for a verdict. None beyond MOST_SEEDS."""
    n = seeds_needed(margin, test.deviation, alpha, least=test.n + 1)
    while n is not None and judge(test._replace(n=n).interval(alpha), margin) is Verdict.undecided:
        n = n + 1 if n < MOST_SEEDS else None
    return n


class Gains(NamedTuple):
    """The gains of an edit over n pairs, baseline - edit: numbers, or arrays of several edits with n pairs each.

    mean     of the gains
    squares  sum of the squared distances to the mean
    """

    n: int
    mean: Any
    squares: Any

    def add(self, gain: Any) -> Gains:
        """With one pair more (Welford 1962)."""
        step = gain - self.mean
        mean = self.mean + step / (self.n + 1)
        return Gains(self.n + 1, mean, self.squares + step * (gain - mean))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """The bounds of the mean gain that hold at all n at once with a confidence of 1 - alpha: every mean against
        which the two-sided evidence without calibration is less than 1 / alpha. Infinite for few pairs."""
        r = 1 + self.n * EFFECT
        ratio = (math.sqrt(r) / alpha) ** (2 / self.n)
        if ratio >= r:
            return -math.inf, math.inf
        half = math.sqrt(self.squares * (ratio - 1) / (1 - ratio / r) / self.n)
        return self.mean - half, self.mean + half


NO_GAINS = Gains(0, 0.0, 0.0)


class Calibration(NamedTuple):
    """An estimate of the variance of a pair from earlier pairs of the track; numbers or arrays."""

    freedom: Any = 0.0
    squares: Any = 0.0

    def add(self, gains: Gains) -> Calibration:
        """With the pairs of an edit; older ones lose weight, so that no more than FREEDOM degrees remain."""
        freedom, squares = self.freedom + gains.n - 1, self.squares + gains.squares
        weight = np.minimum(1.0, FREEDOM / np.maximum(freedom, 1.0))
        return Calibration(freedom * weight, squares * weight)


def log_two_sided(gains: Gains, calibration: Calibration) -> Any:
    """The logarithm of the likelihood ratio of gains with an effect d = mean / deviation ~ N(0, EFFECT) to gains with
    d = 0, for a variance with the calibration's posterior distribution, or Jeffreys' prior without one.

    Pérez-Ortiz, Lardy, de Heide & Grünwald 2022 show that it is an e-value at every n, for every variance.
    """
    r, k = 1 + gains.n * EFFECT, gains.n + calibration.freedom
    around, between = calibration.squares + gains.squares, gains.n * gains.mean**2
    return k / 2 * np.log((around + between) / (around + between / r)) - math.log(r) / 2


def log_one_sided(gains: Gains, calibration: Calibration) -> Any:
    """The same for d > 0 alone: the two-sided ratio times twice the posterior probability of d > 0."""
    r, k = 1 + gains.n * EFFECT, gains.n + calibration.freedom
    around = calibration.squares + gains.squares + gains.n * gains.mean**2 / r
    positive = special.stdtr(k, gains.n * gains.mean * np.sqrt(EFFECT / r * k / around))
    return log_two_sided(gains, calibration) + np.log(2 * np.maximum(positive, 1e-300))


def log_evidence(gains: Gains, calibration: Calibration) -> Any:
    """The logarithm of the evidence that an edit is better; of two pairs or more, not all of them 0.

    The calibrated e-value holds for an edit that leaves the variance as it is. So that no other edit is kept for its
    variance, it counts only from the point on where the e-value without calibration is TRUST; before, the smaller does.
    """
    alone, calibrated = log_one_sided(gains, Calibration()), log_one_sided(gains, calibration)
    return np.where(alone >= TRUST, calibrated, np.minimum(alone, calibrated))[()]


def log_limit(edit: int, keeps: Any) -> Any:
    """The logarithm of the evidence with which an edit is kept.

    edit   its number among those of the track, from 1 on
    keeps  edits before it that were kept

    e-LOND with the weights of an infinite series that sums to 1, of two telescopes: half of it falls as 1 / t^2 from
    the first edit on, and half only from about the hundredth.
    """
    weight = 0.5 / (edit * (edit + 1)) + 50.0 / ((edit + 100) * (edit + 99))
    return -np.log(ALPHA * weight * (keeps + 1))


def hopeless(gains: Gains, calibration: Calibration) -> Any:
    """Whether an edit is dropped now: after one pair if that one is no gain, later if the mean gain is small."""
    if gains.n == 1:
        return gains.mean <= 0
    return gains.mean <= FUTILE * np.sqrt((gains.squares + calibration.squares) / (gains.n - 1 + calibration.freedom))
