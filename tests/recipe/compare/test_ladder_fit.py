"""The law through the sizes, and its prediction, against laws that are known."""

from __future__ import annotations

import numpy as np
import pytest

from recipe.compare.ladder.fit import fit_law, predict

COMPUTE = [1e9, 1e10, 4e10, 1e11]
NEXT = 5e11


def known(compute: float) -> float:
    return 1.5 + 0.8 * (compute / 1e10) ** -0.15


def test_a_law_that_the_losses_follow_is_recovered() -> None:
    law = fit_law(COMPUTE, [known(c) for c in COMPUTE])
    assert law.alpha == pytest.approx(0.15, rel=1e-3)
    assert law.floor == pytest.approx(1.5, rel=1e-3)
    assert law(NEXT) == pytest.approx(known(NEXT), abs=1e-5)


def test_without_noise_the_prediction_is_certain() -> None:
    found = predict(COMPUTE, [[known(c)] * 3 for c in COMPUTE], NEXT)
    assert found.loss == pytest.approx(known(NEXT), abs=1e-5)
    assert found.high - found.low < 1e-4


def test_noisy_sizes_lie_in_their_interval_and_widen_it() -> None:
    """The next size is drawn too; the interval misses one in twenty."""
    rng, widths = np.random.default_rng(5), {}
    for deviation in (0.002, 0.02):
        losses = [known(c) + rng.normal(0, deviation, 3) for c in COMPUTE]
        found = predict(COMPUTE, [list(seeds) for seeds in losses], NEXT)
        assert found.low < known(NEXT) + rng.normal(0, deviation, 3).mean() < found.high
        widths[deviation] = found.high - found.low
    assert widths[0.02] > 3 * widths[0.002]
