"""Verdicts of many sweeps at once: real ones, and ones whose losses are drawn at random from real runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recipe.compare.arena.statistics import ALPHA, paired

Losses = NDArray[np.float64]


class Counts(NamedTuple):
    """How many sweeps gave each verdict on an arm."""

    sweeps: int
    better: int
    worse: int
    equivalent: int
    undecided: int


def verdicts(arm: ArrayLike, baseline: ArrayLike, margin: float, alpha: float = ALPHA) -> Counts:
    """The verdicts on an arm in sweeps of one look, from losses (sweeps, seeds).

    margin  as a share of the baseline's mean loss in that sweep
    """
    ours, theirs = np.asarray(arm, np.float64), np.asarray(baseline, np.float64)
    low, high = paired(ours - theirs).interval(alpha)
    width = margin * theirs.mean(-1)
    equivalent = (-width <= low) & (high <= width)
    better, worse = ~equivalent & (high < 0), ~equivalent & (low > 0)
    decided = [int(of_verdict.sum()) for of_verdict in (better, worse, equivalent)]
    return Counts(len(ours), decided[0], decided[1], decided[2], len(ours) - sum(decided))


def against_itself(losses: Losses, seeds: int) -> tuple[Losses, Losses]:
    """The runs of one configuration as sweeps of two arms, each run used once: (sweeps, seeds) twice."""
    sweeps = len(losses) // (2 * seeds)
    arms = losses[: 2 * seeds * sweeps].reshape(sweeps, 2, seeds)
    return arms[:, 0], arms[:, 1]


def drawn_against_itself(losses: Losses, seeds: int, sweeps: int) -> tuple[Losses, Losses]:
    """Sweeps of two arms whose losses are drawn, with replacement, from the losses of one configuration."""
    arms = np.random.default_rng(0).choice(losses, (2, sweeps, seeds))
    return arms[0], arms[1]


def drawn_pairs(arm: Losses, baseline: Losses, seeds: int, sweeps: int) -> tuple[Losses, Losses]:
    """Sweeps whose pairs are drawn, with replacement, from the pairs of real runs."""
    which = np.random.default_rng(0).integers(len(arm), size=(sweeps, seeds))
    return arm[which], baseline[which]
