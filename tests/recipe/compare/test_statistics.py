"""The statistics of arena and referee against textbooks, brute force and simulation."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from bench.machine import ROOT
from recipe.compare import simulate
from recipe.compare.simulate import (
    SWEEPS,
    draw_normal,
    draw_shared,
    false_verdicts,
    gamma,
    night,
)
from recipe.compare.statistics import (
    ALPHA,
    EFFECT,
    NO_GAINS,
    POWER,
    TRUST,
    Calibration,
    Gains,
    Verdict,
    holm_levels,
    judge,
    log_evidence,
    log_limit,
    log_one_sided,
    outlier,
    paired,
    power_to_equate,
    seeds_needed,
    sign_flip,
    signed_rank,
)

# Student 1908, "The Probable Error of a Mean": additional sleep with the second drug; R prints the rest for
# t.test(extra ~ group, paired = TRUE).
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
# Darwin's pairs of plants, in eighths of an inch; Fisher 1935, section 21: 863 of 32,768 sums in each tail.
MAIZE = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]


def test_the_paired_t_test_gives_students_sleep_data_the_interval_that_r_prints():
    found = paired(SLEEP)
    assert found.mean == pytest.approx(1.58)
    assert found.interval(0.05) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert found.p == pytest.approx(0.002833, abs=1e-6)


def test_differences_without_spread_are_certain_and_one_alone_tells_nothing():
    assert paired([0.0] * 5)[1:] == (0.0, 0.0, 1.0)
    assert paired([[0.25] * 5, [0.0] * 5]).interval(0.05)[0].tolist() == [0.25, 0.0]
    assert paired([0.25] * 5).p == 0.0
    with pytest.raises(ValueError, match="two differences"):
        paired([0.1])


def test_an_outlier_is_what_grubbs_table_calls_one():
    """The critical value of 6 numbers, two-sided at 1 %, is 1.973 (Grubbs and Beck 1972, for 0.5 % on one side)."""
    for top, expected in ((5.0, None), (30.0, 5)):
        d = [-1.0, 1.0, -1.0, 1.0, 0.0, top]
        distance = (top - np.mean(d)) / np.std(d, ddof=1)
        assert (distance > 1.973) == (expected is not None)
        assert outlier(d, 0.5) == expected
    assert outlier([1.0] * 6, 0.5) is None


def test_the_sign_flip_test_counts_fishers_sums_of_darwins_plants():
    assert sign_flip(MAIZE) == pytest.approx(2 * 863 / 2**15)
    assert sign_flip([0.0, 0.0, 0.0]) == 1.0
    assert sign_flip([1.0] * 6) == pytest.approx(2 / 2**6)


def test_a_diverged_seed_counts_as_the_largest_difference():
    assert signed_rank([0.1, 0.2, 0.3, 0.4, 0.5, np.inf]) == pytest.approx(2 / 2**6)
    assert signed_rank([-0.1, -0.2, -0.3, -0.4, -0.5, np.inf]) == pytest.approx(signed_rank([-1, -2, -3, -4, -5, 6]))
    assert signed_rank([0.0, 0.0]) == 1.0


def test_holm_rejects_what_closed_testing_with_bonferroni_rejects():
    """Holm's procedure is the shortcut of this: a hypothesis falls if every intersection that holds it falls."""
    generator = np.random.default_rng(1)
    for _ in range(300):
        m = int(generator.integers(1, 6))
        p = [float(value) for value in generator.beta(0.3, 3.0, m)]
        closed = [
            all(
                min(p[other] for other in others) <= ALPHA / len(others)
                for size in range(1, m + 1)
                for others in itertools.combinations(range(m), size)
                if arm in others
            )
            for arm in range(m)
        ]
        assert [bool(value <= level) for value, level in zip(p, holm_levels(p), strict=True)] == closed


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((-0.05, -0.02), Verdict.better),
        ((0.001, 0.02), Verdict.worse),
        ((-0.009, 0.01), Verdict.equivalent),
        ((-0.009, -0.001), Verdict.equivalent),
        ((-0.02, 0.005), Verdict.undecided),
        ((-0.02, -0.001), Verdict.better),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_margin(interval, verdict):
    assert judge(interval, margin=0.01) is verdict


def test_the_power_of_a_paired_test_is_that_of_the_tables():
    """Half a deviation, at 0.05 two-sided, is found with a power of 0.95 by 54: Cohen's tables, G*Power and R's pwr.

    Equal arms are equivalent where two such tests pass."""
    assert power_to_equate(0.5, 1.0, 54, 0.05) >= 0.90 > power_to_equate(0.5, 1.0, 53, 0.05)


@pytest.mark.parametrize("looks", [1, 2])
def test_the_suggested_seeds_decide_as_often_as_promised(looks):
    alpha, margin, deviation = ALPHA / looks, 1.0, 1.3
    n: Any = seeds_needed(margin, deviation, alpha)
    generator = np.random.default_rng(2)
    for effect, verdicts in ((-margin, {Verdict.better}), (0.0, {Verdict.equivalent})):
        found = paired(generator.normal(effect, deviation, (20_000, n)))
        bounds = zip(*found.interval(alpha), strict=True)
        assert np.mean([judge(interval, margin) in verdicts for interval in bounds]) >= POWER - 0.01
    assert power_to_equate(margin, deviation, n - 1, alpha) < POWER


def test_no_number_of_seeds_is_suggested_where_a_thousand_would_not_do():
    assert seeds_needed(0.001, 1.0, 0.05) is None
    assert seeds_needed(0.001, 0.0, 0.05, least=3) == 3


@pytest.mark.parametrize("arms", [1, 3])
@pytest.mark.parametrize("looks", [(5,), (5, 10)])
def test_equal_arms_are_called_better_or_worse_in_five_sweeps_of_a_hundred_at_most(arms, looks):
    """Skewed noise, the baseline's losses shared by all differences, and every look taken."""
    assert false_verdicts(gamma, arms, looks) <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / SWEEPS)


def gains_of(values: list[float]) -> Gains:
    gains = NO_GAINS
    for value in values:
        gains = gains.add(value)
    return gains


def test_the_evidence_is_the_likelihood_ratio_that_integration_gives():
    """Half-normal effect, and the posterior of the variance after a calibration of 5 degrees of freedom."""
    values, calibration = [0.5, 1.7, 1.1], Calibration(5.0, 4.2)
    variance, effect = np.meshgrid(np.geomspace(0.02, 500, 1500), np.linspace(0, 14, 250), indexing="ij")
    likelihood = stats.invgamma.pdf(variance, 2.5, scale=2.1)
    for value in values:
        likelihood = likelihood * stats.norm.pdf(value / np.sqrt(variance), effect) / np.sqrt(variance)
    null = integrate.trapezoid(likelihood[:, 0], variance[:, 0])
    weighted = likelihood * stats.halfnorm(scale=np.sqrt(EFFECT)).pdf(effect)
    better = integrate.trapezoid(integrate.trapezoid(weighted, effect, axis=1), variance[:, 0])
    assert float(log_one_sided(gains_of(values), calibration)) == pytest.approx(np.log(better / null), abs=1e-3)


def test_gains_that_are_added_one_by_one_have_the_mean_and_the_squares_of_all():
    values = [0.3, -0.2, 1.4, 0.9]
    found = gains_of(values)
    assert (found.n, found.mean, found.squares) == pytest.approx((4, np.mean(values), np.var(values) * 4))
    narrow = Calibration(29.0, 58.0).add(found)  # 32 degrees of freedom, of which 30 remain
    assert narrow == pytest.approx((30.0, (58 + found.squares) * 30 / 32))


def test_a_calibration_counts_only_with_evidence_that_needs_none():
    """Two equal gains of 9 deviations: certain if the deviation is as calibrated, and nothing if it is not."""
    certain = Calibration(30.0, 30.0)
    two, six = gains_of([9.0, 9.5]), gains_of([9.0, 9.5, 8.0, 9.2, 9.9, 8.8])
    assert float(log_one_sided(two, certain)) > 20 > TRUST > float(log_evidence(two, certain))
    assert float(log_evidence(six, certain)) == pytest.approx(float(log_one_sided(six, certain)))


def test_the_weights_of_all_edits_together_are_one():
    weights = [np.exp(-log_limit(edit, 0)) / ALPHA for edit in range(1, 2001)]
    rest = 0.5 / 2001 + 50 / 2100  # of two telescopes
    assert sum(weights) + rest == pytest.approx(1.0)
    assert log_limit(7, 1) == pytest.approx(log_limit(7, 0) - np.log(2))


@pytest.mark.parametrize(("noise", "doubled"), [(draw_normal, 0.0), (draw_normal, 1.0), (draw_shared, 0.0)])
def test_few_nights_of_edits_that_change_nothing_keep_any(noise, doubled):
    nights = 1500
    any_kept = night(noise, 40, nights, seed=5, doubled=doubled)[0].any(1).mean()
    assert any_kept <= ALPHA + 3 * np.sqrt(ALPHA * (1 - ALPHA) / nights)


def test_a_gain_of_two_deviations_as_the_hundredth_edit_takes_eight_pairs():
    keeps, pairs = night(draw_normal, 100, 1000, seed=6, gain=2.0)
    last = keeps[:, -1]
    assert last.mean() > 0.95
    assert np.median(pairs[last, -1]) <= 8


def test_an_interval_holds_at_every_pair_at_once():
    generator, missed = np.random.default_rng(7), 0
    for _ in range(400):
        gains, outside = NO_GAINS, False
        for value in generator.normal(0.4, 1.0, 24):
            gains = gains.add(value)
            low, high = gains.interval()
            outside |= not low <= 0.4 <= high
        missed += outside
    assert 0 < missed <= 0.05 * 400
    assert gains_of([1.0, 1.1]).interval() == (-np.inf, np.inf)


def test_the_pages_have_the_rows_of_the_simulations(capsys, monkeypatch):
    monkeypatch.setattr(simulate, "SWEEPS", 200)  # a hundredth of the page's
    monkeypatch.setattr(simulate, "spend", lambda noise, doubled, size, nights: (0.0, 1.0))
    simulate.main([])
    tables = {"arena": (3, capsys.readouterr().out), "referee": (2, "\n".join(simulate.referee_tables(10)))}
    for name, (columns, table) in tables.items():
        page = (ROOT / "docs" / f"{name}.md").read_text()
        rows = [row for row in table.strip().splitlines() if row]
        assert len(rows) > 5
        assert all("|".join(row.split("|")[:columns]) + "|" in page for row in rows)
