"""Counts of verdicts, against the verdict of each sweep alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from bench.arena.sweeps import against_itself, drawn_against_itself, drawn_pairs, verdicts


def test_verdicts_of_many_sweeps_are_those_of_each() -> None:
    rng = np.random.default_rng(3)
    baseline = 2.0 + rng.normal(0, 0.01, (60, 6))
    arm = baseline + rng.normal(0, 0.004, (60, 6)) + rng.choice([-0.03, 0.0, 0.03], (60, 1))
    each = Counter[str]()
    for ours, theirs in zip(arm, baseline, strict=True):
        low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
        margin = 0.005 * theirs.mean()
        if -margin <= low and high <= margin:
            each["equivalent"] += 1
        else:
            each["better" if high < 0 else "worse" if low > 0 else "undecided"] += 1
    assert min(each[name] for name in ("better", "worse", "equivalent")) > 5
    assert verdicts(arm, baseline, 0.005)._asdict() == {"sweeps": 60, "undecided": 0, **each}


def test_each_run_is_used_once_and_drawn_losses_are_those_that_were_run() -> None:
    losses = np.arange(23.0)
    arms = np.stack(against_itself(losses, 5))
    assert sorted(arms.ravel()) == list(range(20))
    assert arms.shape == (2, 2, 5)
    assert set(np.stack(drawn_against_itself(losses, 5, 100)).ravel()) == set(losses)


def test_equal_arms_are_called_different_in_one_of_twenty_sweeps() -> None:
    losses = np.random.default_rng(0).normal(2.0, 0.1, 4000)
    counts = verdicts(*drawn_against_itself(losses, 5, 20_000), 1e-9)
    assert (counts.better + counts.worse) / counts.sweeps == pytest.approx(0.05, abs=0.005)


def test_pairs_stay_together() -> None:
    baseline = np.random.default_rng(0).normal(2.0, 0.1, 30)
    arm, theirs = drawn_pairs(baseline + 0.25, baseline, 8, 50)
    assert np.allclose(arm - theirs, 0.25)
