"""The results of an arena's runs: differences, verdicts, and readings at equal cost."""

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from recipe.compare.arena_results import (
    Arena,
    SizeDifference,
    differences_by_size,
    race,
    slope,
)
from recipe.compare.arena_tables import lr_table, race_table, size_table, verdict_table
from recipe.compare.statistics import Verdict
from tests.recipe.compare.reading import arena_of, edit, edit_summary
from tests.recipe.compare.synthetic_arena import losses_of, write_arena

DIVERGED = {"status": "failed", "non_finite_step": 40, "val_loss": "nan"}


def of(arena: Arena, arm: str) -> Any:
    return next(found for found in arena.comparisons if found.arm.name == arm)


def test_the_four_verdicts_and_the_levels_of_arms_and_looks(tmp_path):
    arena = arena_of(write_arena(tmp_path / "a", {"base": 0.0, "low": -0.1, "high": 0.1, "same": 1e-5}))
    expected = [Verdict.better, Verdict.worse, Verdict.equivalent]
    assert [found.verdict for found in arena.comparisons] == expected
    assert min(found.level for found in arena.comparisons) == pytest.approx(0.05 / 3)
    noisy = of(arena_of(write_arena(tmp_path / "b", {"base": 0.0, "near": -0.009}, deviation=0.012, looks=2)), "near")
    assert (noisy.verdict, noisy.level) == (Verdict.undecided, 0.025)


def test_the_interval_is_scipys_paired_t_interval_of_the_final_losses(tmp_path):
    arena = arena_of(write_arena(tmp_path, {"base": 0.0, "low": -0.1}, seeds=5))
    ours, theirs = (
        [losses_of(seed, effect, 0.004, arm) for seed in range(1, 6)] for arm, effect in (("low", -0.1), ("base", 0.0))
    )
    expected = stats.ttest_rel(ours, theirs)
    found = of(arena, "low")
    assert found.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (found.level, found.interval) == (0.05, pytest.approx((interval.low, interval.high)))
    difference = np.mean(np.subtract(ours, theirs))
    cell = f"{difference:.4f} ({100 * difference / np.mean(theirs):.2f} %)"
    assert cell in verdict_table(arena).rows[1]


def test_arms_that_are_equal_to_the_bit_are_equivalent(tmp_path):
    found = of(arena_of(write_arena(tmp_path, {"base": 0.0, "same": 0.0}, deviation=0.0)), "same")
    assert (found.verdict, found.interval, found.p) == (Verdict.equivalent, (0.0, 0.0), 1.0)
    assert "equal bit for bit" in verdict_table(arena_of(tmp_path)).rows[1]


def test_seeds_that_diverged_are_never_equivalent_and_decide_by_their_ranks(tmp_path):
    changes = {("once", 2): DIVERGED, **{("always", seed): DIVERGED for seed in range(1, 9)}, ("base", 8): DIVERGED}
    arena = arena_of(write_arena(tmp_path, {"base": 0.0, "once": 1e-5, "always": -0.1}, seeds=8, changes=changes))
    once, always = arena.comparisons
    assert (once.diverged, once.verdict) == ([2, 8], Verdict.undecided)
    assert (once.differences[2], once.differences[8]) == (math.inf, -math.inf)
    assert (always.verdict, always.test, always.differences[8]) == (Verdict.worse, None, 0.0)


def test_there_is_no_verdict_before_every_planned_run_has_a_result(tmp_path):
    """A run that was not started, one that failed, and one with another seed than the plan's."""
    failed = {"status": "failed", "message": "the disk is full."}
    folder = write_arena(tmp_path, {"base": 0.0, "low": -0.1}, changes={("low", 3): None, ("low", 4): failed})
    edit_summary(folder / "1", lambda summary: summary | {"config": summary["config"] | {"seed": 17}})
    found = of(arena_of(folder), "low")
    assert (found.verdict, found.missing) == (Verdict.undecided, (1, 3, 4))


def test_the_seeds_that_are_suggested_decide(tmp_path):
    """The same arm once more with that many seeds has a verdict."""
    effects = {"base": 0.0, "near": -0.009}
    few = of(arena_of(write_arena(tmp_path / "few", effects, deviation=0.012)), "near")
    assert few.verdict is Verdict.undecided
    many = of(arena_of(write_arena(tmp_path / "many", effects, deviation=0.012, seeds=6 + few.more)), "near")
    assert many.verdict is not Verdict.undecided


def test_at_equal_cost_the_dearer_arm_is_read_where_the_cheaper_one_ends(tmp_path):
    """Losses fall by a nat over the run: an arm half as fast is half a nat behind, less its effect."""
    effects, time, flops = {"base": 0.0, "slow": -0.1, "window": 0.05}, {"slow": 100.0}, {"window": 8e5}
    arena = arena_of(write_arena(tmp_path, effects, deviation=0.0, step_ms=time, flops=flops))
    expected = {
        ("slow", "throughput/step_ms"): 0.5 - 0.1, ("slow", "flops_per_token"): -0.1,
        ("window", "throughput/step_ms"): 0.05, ("window", "flops_per_token"): 0.05 - 0.2,
    }  # fmt: skip
    for (arm, cost), difference in expected.items():
        assert of(arena, arm).at_equal(cost).mean == pytest.approx(difference)


def test_the_race_ends_where_an_arm_reaches_the_baselines_final_loss(tmp_path):
    """Losses fall by a nat over 300 steps: an arm that is 0.1 nats better is there after 270 of them."""
    effects, slow = {"base": 0.0, "low": -0.1, "high": 0.1}, {"low": 100.0}
    arena = arena_of(write_arena(tmp_path, effects, deviation=0.0, step_ms=slow, seeds=2))
    found = race(arena.arms["low"], arena.baseline)
    assert (found.reached, found.less) == (2, pytest.approx((300 / 270, 300 * 50 / (270 * 100))))
    assert race(arena.baseline, arena.baseline) == (2, 2, (1, 1))
    assert race(arena.arms["high"], arena.baseline) == (0, 2, None)


def test_an_arm_that_reaches_the_loss_with_some_seeds_only_has_no_ratio(tmp_path):
    """Two seeds reach it after 270 steps; the mean over them alone would call the arm faster."""
    folder = write_arena(tmp_path, {"base": 0.0, "arm": -0.1}, deviation=0.0, seeds=3)
    edit(folder / "5", lambda line: line | {"val/loss": 9.0})
    assert race_table(arena_of(folder)).rows[1] == ("arm", "2 of 3", "-", "-")


def test_the_slope_is_the_mean_of_each_seeds_regression(tmp_path):
    generator, operations = np.random.default_rng(0), [1e9, 3e10, 1e12]
    gaps = generator.normal(size=(3, 4))
    sizes = [SizeDifference(n, operations[n], dict(enumerate(at_size))) for n, at_size in enumerate(gaps.tolist())]
    slopes = [stats.linregress(np.log10(operations), of_seed).slope for of_seed in gaps.T]
    found: Any = slope(sizes)
    assert (found.n, found.mean) == (4, pytest.approx(np.mean(slopes)))
    assert found.interval(0.05) == pytest.approx(
        stats.t.interval(0.95, 3, loc=np.mean(slopes), scale=stats.sem(slopes))
    )


def test_sizes_have_a_difference_each_and_the_verdict_is_about_the_largest(tmp_path):
    """Two sizes of two seeds, as the plan numbers them: seed, size, arm."""
    folder = write_arena(tmp_path, {"base": 0.0, "arm": -0.1}, deviation=0.0, seeds=4)
    path = folder / "arena.json"
    plan = json.loads(path.read_text())
    plan["sizes"] = {size: {"base": [], "arm": []} for size in ("1", "4")}
    plan["looks"][-1]["seeds"] = 2
    path.write_text(json.dumps(plan))
    for number in range(8):
        path = folder / str(number) / "summary.json"
        summary = json.loads(path.read_text())
        size, arm = number // 2 % 2, number % 2
        summary |= {"flops_per_token": 10.0 ** (6 + size), "val_loss": 2.0 - arm * (0.1 + 0.2 * size) - 0.01 * number}
        summary["config"]["seed"] = number // 4 + 1
        path.write_text(json.dumps(summary))
    arena = arena_of(folder)
    smallest, largest = differences_by_size(arena, "arm")
    assert (smallest.size, largest.size) == (1, 4)
    assert list(smallest.differences.values()) == pytest.approx([-0.11, -0.11])
    assert list(largest.differences.values()) == pytest.approx([-0.31, -0.31])
    assert of(arena, "arm").differences == largest.differences
    found: Any = size_table(arena)
    assert found.rows[-1][-1].startswith("-0.2000")


def test_the_edge_of_the_learning_rates_is_noticed(tmp_path):
    for lowest, choice in ((0.05, "chosen, at the edge"), (-0.05, "chosen")):
        rates = {0.001: 0.1, 0.002: lowest, 0.004: 0.0}
        found: Any = lr_table(arena_of(write_arena(tmp_path / choice, {"base": 0.0, "b": 0.1}, rates=rates)))
        assert [row[3] for row in found.rows[:3]] == [f"{2.5 + effect:.4f}" for effect in rates.values()]
        assert [row[4] for row in found.rows[:3] if row[4] != "-"] == [choice]
