"""An arena: the stages, the choice of learning rates, going on, adding seeds.

A list stands for the processes, and gives each job a loss that its overrides decide.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from recipe.run.arena import checked_plan, run_arena
from recipe.run.compose import composed, to_config
from recipe.run.jobs import Job, SweepError
from recipe.run.plan import PlanError
from tests.recipe.compare.reading import plan_of

ARGUMENTS = ["experiment=arena", 'arena.arms="causal: score=causal | alibi: score=alibi"']
BEST = {"causal": 0.003, "alibi": 0.006}


class Jobs:
    """Runs jobs without processes. `ends` holds how a job ends instead, by its number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: list[tuple[int, int, list[dict[str, str]]]] = []
        self.ends: dict[int, dict[str, Any]] = {}

    def run(self, jobs: Sequence[Job], train: Any = None, ahead: int = 0) -> None:
        if not jobs:
            return
        overrides = [dict(line.split("=", 1) for line in job.overrides) for job in jobs]
        self.launched.append((jobs[0].number, ahead, overrides))
        for job, lines in zip(jobs, overrides, strict=True):
            rate, arm = float(lines.get("optimizer.lr", 0.003)), lines["arena.arm"].strip("'")
            summary = {"status": "completed", "val_loss": 2.0 + abs(rate - BEST.get(arm, 0.003))}
            job.folder.mkdir(exist_ok=True)
            (job.folder / "summary.json").write_text(json.dumps(summary | self.ends.get(job.number, {})))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*overrides, ends={number: summary}): one start of the sweep in tmp_path; returns its jobs.

    Learning rates are tried on one seed.
    """

    monkeypatch.setattr("recipe.run.plan.LR_SEEDS", 1)

    def run(*overrides, ends=None):
        arguments = [*ARGUMENTS, *overrides]
        jobs: Any = Jobs(tmp_path)
        jobs.ends = ends or {}
        run_arena(checked_plan(to_config(composed(arguments)), arguments, lambda _: []), jobs, None)
        return jobs

    return run


def test_learning_rates_come_first_and_each_arm_then_uses_its_best(start, tmp_path):
    (first, ahead, tried), (second, last, runs) = start("arena.seeds=2").launched
    assert (first, ahead, len(tried)) == (0, 4, 6)
    assert (second, last, len(runs)) == (6, 0, 4)
    assert [(job["arena.arm"], job["seed"], float(job["optimizer.lr"]), job["score"]) for job in runs] == [
        (f"'{arm}'", seed, BEST[arm], arm) for seed in ("1", "2") for arm in BEST
    ]
    assert plan_of(tmp_path).chosen == BEST


def test_the_plan_is_written_before_the_first_run(start, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise SystemExit(1)

    monkeypatch.setattr(Jobs, "run", fails)
    with pytest.raises(SystemExit):
        start()
    plan = plan_of(tmp_path)
    assert (list(plan.arms), plan.chosen, plan.looks[0].seeds) == (["causal", "alibi"], {}, 6)
    assert plan.common == ["experiment=arena"]


def test_seeds_are_added_to_what_is_done(start, tmp_path):
    start("arena.seeds=2")
    start("arena.seeds=2")  # is no look
    ((first, _, runs),) = start("arena.seeds=4").launched
    assert first == 6, "learning rates are not tried again"
    assert [job["seed"] for job in runs] == ["1", "1", "2", "2", "3", "3", "4", "4"], "whole pairs come first"
    assert [look.seeds for look in plan_of(tmp_path).looks] == [2, 4]
    for changed, sentence in (
        ("arena.seeds=2", r"arena\.seeds=2 is fewer than the 4"),
        ("arena.rules.margin=0.01", r"its margin is 0\.005 instead of 0\.01"),
        ("arena.rules.looks=1", "its looks is 2 instead of 1"),
        ("arena.lr=[1]", "its lr is"),
    ):
        with pytest.raises(PlanError, match=sentence):
            start("arena.seeds=4", changed)


def test_a_learning_rate_that_diverges_is_not_chosen(start, tmp_path):
    start("arena.seeds=2", ends={1: {"status": "failed", "non_finite_step": 7, "val_loss": None}})
    assert plan_of(tmp_path).chosen["causal"] != BEST["causal"]


def test_no_learning_rate_is_chosen_where_a_run_has_no_result(start):
    with pytest.raises(SweepError, match="has no result, so no learning rate can be chosen"):
        start("arena.seeds=2", ends={1: {"status": "interrupted"}})


@pytest.mark.parametrize(("factors", "rate"), [("[]", None), ("[2]", "0.006")])
def test_no_factor_leaves_the_learning_rate_alone_and_one_is_taken_without_a_try(start, factors, rate):
    ((_, _, jobs),) = start("arena.seeds=2", f"arena.lr={factors}").launched
    assert {job.get("optimizer.lr") for job in jobs} == {rate}
