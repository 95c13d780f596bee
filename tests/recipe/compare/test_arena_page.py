"""The pages of an arena's report."""

import datetime
import html
import json
import time

import pytest

from compare import main
from recipe.compare.arena_page import added_too_often, arena_headline, go_on, skewed, write_arena_report
from recipe.compare.runs import find_runs
from recipe.errors import UserError
from tests.browser import needs_browser
from tests.programs import rewrite
from tests.recipe.compare.reading import arena_of, edit, plan_of, rows_of
from tests.recipe.compare.synthetic_arena import losses_of, write_arena
from tests.recipe.compare.test_arena_results import DIVERGED
from tests.recipe.compare.test_page import assert_readable, open_in_browser

EFFECTS = {"causal": 0.0, "alibi": -0.1, "window": 0.05, "sinks": 1e-5, "odd <b>&|*arm*": 0.011}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every verdict, a diverged seed, a slow arm that wins, learning rates, and a command to go on."""
    folder = tmp_path_factory.mktemp("multirun") / "10-00-00"
    return write_arena(
        folder,
        EFFECTS,
        looks=2,
        rates={0.001: 0.1, 0.003: 0.0, 0.006: 0.1},
        step_ms={"alibi": 80.0},
        changes={("odd <b>&|*arm*", 2): DIVERGED},
        arguments=("experiment=arena", "arena.seeds=6", 'arena.arms="a b | c"'),
    )


@pytest.fixture(scope="module")
def report(folder):
    return write_arena_report(find_runs([folder]), plan_of(folder), folder, folder / "report")


def test_the_headline_and_a_line_for_each_arm_give_the_answer(report):
    assert report.headline.text == (
        "alibi is better than causal; window is worse; sinks is equivalent; odd <b>&|*arm* is undecided (6 seeds)"
    )
    said = dict(report.lines)
    assert said["alibi"].startswith("better, -0.1")
    assert said["window"].startswith("worse, +0.0")
    arms = next(table for table in report.sections[0].tables if table.name == "arms")
    row = rows_of(arms)[-1]
    assert (row["verdict"], row["seeds"]) == ("undecided", "6, 1 diverged")


def test_the_files_are_complete(folder, report):
    out = folder / "report"
    assert {path.name for path in out.iterdir()} == {"index.html", "runs.csv", "arena.json", "figures"}
    names = {path.stem for path in (out / "figures").glob("*.png")}
    assert names == {"forest", "loss", "recall-mqar"}
    assert "<b>&|" not in (out / "index.html").read_text().replace("&lt;b&gt;&amp;|", "")
    arms = json.loads((out / "arena.json").read_text())["arms"]
    verdicts = ["better", "worse", "equivalent", "undecided"]
    assert [(arm, found["verdict"]) for arm, found in arms.items()] == [*zip([*EFFECTS][1:], verdicts, strict=True)]
    assert arms["odd <b>&|*arm*"]["diverged"] == [2]
    assert arms["odd <b>&|*arm*"]["differences"]["2"] == "inf"


def test_probes_are_columns_with_paired_differences(report):
    (table,) = (table for table in report.sections[0].tables if table.name == "probes")
    rows = {(probe, arm): (mean, apart) for probe, arm, mean, apart in table.rows}
    assert rows["mqar", "causal"][1] == "-"
    mean, half = (float(number) for number in rows["mqar", "alibi"][1].split(" ± "))
    assert mean == pytest.approx(0.1018 / 10, abs=2e-4)  # a tenth of the difference in loss, the other way round
    assert half == pytest.approx(0.0070 / 10, abs=1e-4)
    assert rows["mqar_x2", "window"] == ("0.25", "0")


def test_an_undecided_arm_comes_with_the_command_that_adds_its_seeds(tmp_path):
    arguments = ("experiment=arena", "arena.seeds=6", 'arena.arms="base | near: x=1"', "hydra.sweep.dir=old")
    effects = {"base": 0.0, "near": -0.011}
    took = {(arm, seed): {"wall_time_s": of} for arm, of in (("base", 60), ("near", 90)) for seed in range(1, 7)}
    folder = write_arena(tmp_path / "s", effects, deviation=0.012, looks=2, arguments=arguments, changes=took)
    arena = arena_of(folder)
    title, command = go_on(arena, folder) or ("", "")
    more = int(title.split()[1])
    assert more == arena.comparisons[0].more
    assert f"(about {datetime.timedelta(seconds=more * (60 + 90))} of runs" in title  # a run of each arm for each seed
    assert command == (
        f"python train.py experiment=arena 'arena.arms=\"base | near: x=1\"' arena.seeds={6 + more} "
        f"hydra.sweep.dir={folder}"
    )


def test_when_the_looks_are_used_up_the_way_on_is_other_seeds_and_more_are_warned_of(tmp_path):
    effects = {"base": 0.0, "near": -0.011}
    arena = arena_of(write_arena(tmp_path / "s", effects, deviation=0.012))
    title, command = go_on(arena, tmp_path) or ("", "")
    assert title.startswith("The planned looks are used up; start anew with")
    assert command.endswith(" arena.rules.first_seed=7 arena.rules.looks=1")
    assert added_too_often(arena.plan) == []
    (warning,) = added_too_often(arena_of(write_arena(tmp_path / "t", effects, looked=(3, 6))).plan)
    assert warning.startswith("Seeds were added 1 times, and the plan had 1 looks")


def test_a_seed_far_from_the_others_is_warned_of(tmp_path):
    far = {("late", 2): {"val_loss": 3.0}}
    (warning,) = skewed(arena_of(write_arena(tmp_path, {"base": 0.0, "even": -0.01, "late": -0.01}, changes=far)))
    assert warning.startswith("late differs with seed 2 by +0.4")


def test_a_seed_far_from_the_others_by_rounding_alone_is_not_warned_of(tmp_path):
    """Neither where the verdict is *equivalent*, nor where a seed is missing."""
    rounded = {("noop", 3): {"val_loss": losses_of(3, 0.0, 0.0, "noop") + 5e-08}}
    folder = write_arena(tmp_path, {"base": 0.0, "noop": 0.0, "other": 0.0}, deviation=0.0, seeds=4, changes=rounded)
    for missing, verdict in ((None, "equivalent"), (folder / "10", "undecided")):
        if missing:
            (missing / "summary.json").unlink()
        arena = arena_of(folder)
        assert arena.comparisons[0].verdict.value == verdict
        assert skewed(arena) == []


def test_arms_that_solve_a_task_are_judged_by_their_answers(tmp_path):
    """Their losses differ; what counts is that both give every right answer."""
    folder = write_arena(tmp_path, {"full": 0.0, "window": 0.3})
    for path in folder.glob("*/summary.json"):
        rewrite(path, '"name": "stdlib"', '"name": "mqar"')
        edit(path.parent, lambda line: line | {"probe/mqar": 0.999})
    arena = arena_of(folder)
    assert arena_headline(arena).text == "both solve mqar (6 seeds)"
    assert arena.comparisons[0].verdict.value == "equivalent"
    assert list(arena.baseline.losses.values()) == pytest.approx([0.001] * 6)


def test_compare_recognises_an_arena_and_keeps_it_alone(tmp_path, capsys):
    folder = write_arena(tmp_path / "s", {"base": 0.0, "arm": -0.1, "near": -0.011}, deviation=0.012, looks=2)
    main([str(folder)])
    printed = capsys.readouterr().out
    assert "arm is better than base; near is undecided (6 seeds)." in printed
    (command,) = [line for line in printed.splitlines() if line.startswith("  python train.py")]
    assert html.escape(command.strip(), quote=False) in (folder / "report" / "index.html").read_text()
    other = write_arena(tmp_path / "t", {"base": 0.0, "arm": -0.1})
    with pytest.raises(UserError, match="give it alone"):
        main([str(folder), str(other)])
    (other / "arena.json").write_text('{"format": 7}')
    with pytest.raises(UserError, match=r"^.*has format 7.*$"):
        main([str(other)])


@pytest.mark.slow
def test_a_report_of_100_runs_takes_seconds(tmp_path):
    effects = {f"arm-{n}": -0.01 * n for n in range(4)}
    folder = write_arena(tmp_path / "s", effects, seeds=22, rates={0.001: 0.1, 0.003: 0.0, 0.006: 0.2})
    start = time.process_time()  # which other programs do not lengthen
    main([str(folder)])
    assert time.process_time() - start < 6


@needs_browser
def test_the_first_screen_is_the_answer_on_a_phone_and_on_a_desk(folder, report, tmp_path):
    measured, console = open_in_browser((folder / "report" / "index.html").read_text(), tmp_path)
    assert console == []
    for frame, height in zip(measured, (844, 800), strict=True):  # of a phone's and of a laptop's screen
        assert frame["headline"] == report.headline.text
        assert frame["first"] <= height, "the forest plot ends below the first screen"
        assert len(frame["figures"]) == 1 + len(report.sections[0].drawings)
        assert_readable(frame)
