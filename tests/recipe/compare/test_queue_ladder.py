"""A ladder as a sweep: the sizes, the prediction before the next one, continuing. A launcher replaces the processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe.compare.arena.plan import PlanError
from recipe.compare.ladder.page import ladder_answer, missing, write_ladder_report
from recipe.compare.ladder.plan import read_ladder
from recipe.compare.ladder.results import rungs_of
from recipe.compare.queue.jobs import SweepError
from recipe.compare.queue.ladder import LadderSweeper
from recipe.compare.runs import find_runs
from recipe.run.compose import composed

ARGUMENTS = ["experiment=ladder", 'arena.arms="causal: score=causal | near: score=alibi"', "arena.seeds=2"]
GAIN = 0.1  # of near, at every size


def law(depth: int, seed: int) -> float:
    return 2.0 + 1.0 / depth + 0.001 * seed


class Launcher:
    """Runs jobs without processes: their losses follow a law. Notes what was predicted before each stage."""

    def __init__(self, folder: Path, lost: Sequence[int]) -> None:
        self.folder, self.lost, self.ahead = folder, lost, 0
        self.stages: list[tuple[int, list[dict[str, str]], bool]] = []

    def launch(self, jobs: Sequence[Sequence[str]], initial_job_idx: int) -> list[None]:
        overrides = [dict(line.split("=", 1) for line in job) for job in jobs]
        plan = read_ladder(self.folder)
        self.stages.append((initial_job_idx, overrides, bool(plan and plan.predicted)))
        for number, job in enumerate(overrides, start=initial_job_idx):
            depth, seed = int(job["ladder.depth"]), int(job["seed"])
            loss = law(depth, seed) - GAIN * (job["score"] == "alibi")
            summary: dict[str, Any] = {"status": "completed", "val_loss": loss, "config": {"seed": seed}, "step": 9}
            summary |= {
                "flops_per_token": 1e3 * depth**3 + 1e2 * depth,
                "tokens": 256 * depth,
                "parameters": 10 * depth,
            }
            run = self.folder / str(number)
            run.mkdir(exist_ok=True)
            (run / "summary.json").write_text(json.dumps({} if number in self.lost else summary))
        return [None] * len(jobs)


@pytest.fixture
def start(tmp_path: Path):
    """start(*overrides, lost=(number, ...)): one start of the sweep in tmp_path; returns the launcher."""

    def run(*overrides: str, lost: Sequence[int] = ()) -> Launcher:
        arguments = [*ARGUMENTS, *overrides]
        sweeper = LadderSweeper()
        sweeper.command_line = arguments
        sweeper.settings = composed([*arguments, f"hydra.sweep.dir={tmp_path}"])
        sweeper.loader = SimpleNamespace(load_sweep_config=lambda _, lines: composed(lines))
        sweeper.jobs = Launcher(tmp_path, lost)
        sweeper.sweep(arguments)
        return sweeper.jobs

    return run


def test_the_next_size_is_predicted_before_it_is_run(start, tmp_path: Path) -> None:
    (first, fitted, early), (second, last, predicted) = start().stages
    assert (first, len(fitted), early) == (0, 16, False)
    assert (second, len(last), predicted) == (16, 4, True)
    assert {job["ladder.depth"] for job in last} == {"6"}
    assert all((job["model.n_layers"], job["model.n_embd"], job["model.n_heads"]) == ("6", "192", "6") for job in last)
    plan = read_ladder(tmp_path)
    assert plan is not None
    loss, low, high, compute = plan.predicted["causal"]
    assert low <= loss <= high
    assert loss == pytest.approx(law(6, 1), abs=0.02)
    assert compute == pytest.approx((1e3 * 6**3 + 1e2 * 6) * 256 * 6)
    start()
    assert read_ladder(tmp_path) == plan  # what was predicted stays


def test_the_report_sets_the_prediction_beside_what_came_out(start, tmp_path: Path) -> None:
    start()
    plan = read_ladder(tmp_path)
    assert plan is not None
    report = write_ladder_report(find_runs([tmp_path]), plan, tmp_path / "report")
    results = json.loads((tmp_path / "report" / "ladder.json").read_text())["arms"]
    for arm in ("causal", "near"):
        low, high = plan.predicted[arm][1:3]
        measured = (law(6, 1) + law(6, 2)) / 2 - GAIN * (arm == "near")
        assert results[arm]["inside"] == (low <= measured <= high)
    assert "Predicted 2." in report.sections[0].answer.bullets[0][1]
    assert "is -0.1000 at depth 1 and -0.1000 at depth 6" in report.sections[0].answer.bullets[1][1]
    assert results["near"]["slope"][0] == pytest.approx(0, abs=1e-9)
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.count("<figure>") == 2
    assert ">10⁶</text>" in page
    assert "mathdefault" not in page


def test_runs_that_are_missing_are_named_and_nothing_is_predicted(start, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match="near at depth 1 has a run without a finite loss"):
        start(lost=[1])
    plan = read_ladder(tmp_path)
    assert plan is not None
    assert plan.predicted == {}
    rungs = rungs_of(plan, find_runs([tmp_path]).runs)
    assert ladder_answer(plan, rungs).headline == "Depth 6 is not predicted yet (2 seeds)"
    assert missing(plan, rungs) == ["near at depth 1 has a finite loss for 1 of 2 seeds."]


def test_another_plan_or_another_version_in_the_folder_is_refused(start, tmp_path: Path) -> None:
    start()
    with pytest.raises(PlanError, match=r"its arena\.seeds is 2 instead of 3"):
        start("arena.seeds=3")
    path = tmp_path / "ladder.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"predicted": {"causal": [1.0]}}))
    with pytest.raises(PlanError, match=r"is damaged \(predicted\)"):
        start()
    path.write_text(json.dumps(content | {"format": 9}))
    with pytest.raises(PlanError, match="has format 9"):
        start()
