"""The verdict on synthetic run folders, whose generator knows which implementations are correct."""

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.compare.parity import judge, seed_spread, window_of
from recipe.compare.runs import read_run
from recipe.compare.tables import parity_table
from recipe.compare.verdict import Gap, NotFinite, Outcome, Verdict
from tests.recipe.compare.reading import cells_in, edit, rows_of, runs_in
from tests.recipe.compare.synthetic import ERRORS, write_run, write_runs


def judged(folder: Path, reference: str = "naive") -> list[Verdict]:
    return judge(cells_in(folder), reference)


def only(folder: Path, reference: str = "naive") -> Any:
    (verdict,) = judged(folder, reference)
    return verdict


def sweep(folder: Path, seeds: tuple[int, ...] = (1, 2, 3), other: str = "flash", **options: object) -> Any:
    """The verdict on one other implementation, which has the options, next to naive with the same seeds."""
    shared = {key: value for key, value in options.items() if key in ("precision", "steps")}
    write_runs(folder, ["naive"], seeds, **shared)
    write_runs(folder, [other], seeds, **options)
    return only(folder)


@pytest.fixture
def three(tmp_path):
    """A folder with three seeds of the reference."""
    write_runs(tmp_path, ["naive"], (1, 2, 3))
    return tmp_path


def row_of(verdict: Verdict) -> dict[str, str]:
    """The row of an implementation in the table of verdicts."""
    return rows_of(parity_table([verdict], "naive"))[0]


@pytest.mark.parametrize(("precision", "chaos"), [("bf16", 1), ("bf16", 100), ("fp32", 1), ("fp32", 100)])
def test_a_correct_implementation_passes(tmp_path, precision, chaos):
    for n in range(8):
        seeds = (3 * n, 3 * n + 1, 3 * n + 2) if n % 2 else (2 * n, 2 * n + 1)
        verdict = sweep(tmp_path / str(n), seeds, precision=precision, chaos=chaos)
        assert verdict.outcome is Outcome.holds, f"seeds {seeds}: {verdict}"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_wrong_implementation_is_caught(tmp_path, error, precision):
    verdict = sweep(tmp_path, (0, 10), error=error, precision=precision)
    assert verdict.outcome is Outcome.broken
    assert verdict.probe.ratio > 10


def test_the_table_shows_what_was_measured(tmp_path):
    verdict = sweep(tmp_path)
    assert verdict.outcome is Outcome.holds
    row = row_of(verdict)
    assert row["same weights"] == f"{verdict.probe.ratio:.2g}"
    assert row["curve"] == f"{100 * (verdict.curve.ratio or 0):.2g} %"
    assert row["final losses"] == f"{verdict.final.difference:.2g}"
    assert row["attention alone"] == "0.5"
    assert row["not measured"] == "the log-sum-exp (it is not returned)"


def test_losses_that_are_bitwise_equal_are_reported_so(tmp_path):
    for seed in (1, 2):
        twin, metrics = write_run(tmp_path / f"tiled-{seed}", "tiled", seed), "metrics.jsonl"
        (twin / metrics).write_bytes((write_run(tmp_path / f"naive-{seed}", "naive", seed) / metrics).read_bytes())
    assert row_of(only(tmp_path))["curve"] == "equal bit for bit"


def test_what_was_not_measured_leaves_parity_open(tmp_path):
    """Without the probe, an error smaller than the spread between seeds looks like a correct implementation."""
    assert sweep(tmp_path / "unprobed", probe_every=0).gaps == (Gap.no_probe,)
    assert sweep(tmp_path / "wrong", probe_every=0, error="mask_ignores_layer").outcome is Outcome.open
    single = sweep(tmp_path / "single", (1,))
    assert (single.outcome, single.gaps) == (Outcome.open, (Gap.single_seed,))
    assert "the reference ran with one seed" in row_of(single)["not measured"]
    assert sweep(tmp_path / "scale", (1,), error="scale").outcome is Outcome.broken  # the probe needs no spread
    write_runs(tmp_path / "others", ["naive"], (1, 2))
    write_runs(tmp_path / "others", ["flash"], (3,))
    assert only(tmp_path / "others").gaps == (Gap.no_shared_losses,)
    own = {"attention.dropout": 0.1, "attention.rng": "torch"}
    write_run(tmp_path / "masks" / "naive", "naive", 1, overrides={"attention.dropout": 0.1})
    write_run(tmp_path / "masks" / "sdpa", "sdpa", 1, overrides=own, error="scale")
    assert (only(tmp_path / "masks").outcome, only(tmp_path / "masks").gaps) == (Outcome.open, (Gap.own_masks,))


def test_a_curve_further_away_than_the_seeds_are_is_broken_even_where_no_probe_ran(three):
    shift(write_run(three / "flash", "flash", 1, probe_every=0), "train/loss", 0.4, after=200)
    verdict = only(three)
    assert verdict.outcome is Outcome.broken
    assert verdict.curve.step > 200
    assert row_of(verdict)["where"] == f"curve: step {verdict.curve.step}"


def test_a_loss_that_differs_from_the_start_is_broken_though_the_probe_agrees(tmp_path):
    """That happens where the compiled model is wrong and the probe's, which is not compiled, is correct."""
    write_runs(tmp_path, seeds=(1, 2, 3), precision="fp32")
    for folder in tmp_path.glob("flash-*"):
        shift(folder, "val/loss", 0.02)
    verdict = only(tmp_path)
    assert verdict.outcome is Outcome.broken
    assert verdict.probe.agrees
    assert (row_of(verdict)["final losses"], verdict.final.amplified) == ("0.02", False)


def test_rounding_that_training_amplified_is_accepted_and_explained(tmp_path):
    verdict = sweep(tmp_path, precision="fp32", chaos=100)
    assert verdict.final.difference > verdict.final.floor > 0
    assert verdict.outcome is Outcome.holds
    assert verdict.final.amplified


def test_curves_that_cross_are_no_evidence_against_an_implementation(tmp_path):
    """Where the losses of two seeds are equal by chance, their spread is zero, and any difference exceeds it."""
    write_runs(tmp_path, seeds=(1, 2))
    same = json.loads((tmp_path / "naive-1" / "metrics.jsonl").read_text().splitlines()[20])

    def cross(line, apart):
        return line | ({"train/loss": same["train/loss"] + apart} if line["step"] == same["step"] else {})

    edit(tmp_path / "naive-2", partial(cross, apart=0.0))
    edit(tmp_path / "flash-2", partial(cross, apart=1e-4))
    assert only(tmp_path).outcome is Outcome.holds


def test_a_run_is_broken_by_nan_only_where_another_of_its_seed_came_past_the_step(three):
    """Without the reference, an ablated run is compared with its intact self, as in experiment=break_it."""
    stopped: dict[str, Any] = {"status": "failed", "stop": 120, "non_finite_step": 126}
    write_run(three / "tiled", "tiled", 1, **stopped)
    assert only(three).outcome is Outcome.broken
    assert row_of(only(three))["where"] == "not finite at step 126 with seed 1, where naive is"
    for name in ("naive", "tiled"):
        write_run(three / "both" / name, name, 1, **stopped)
    assert only(three / "both").outcome is Outcome.open
    write_run(three / "alone" / "0", "tiled", 7)
    ablated = {"attention.ablate": "no_max_subtraction"}
    write_run(three / "alone" / "1", "tiled", 7, overrides=ablated, **stopped)
    verdicts = {verdict.label: verdict for verdict in judged(three / "alone")}
    assert verdicts["tiled no_max_subtraction"].not_finite == NotFinite(126, 7, "tiled")
    assert verdicts["tiled"].outcome is Outcome.open


def test_a_nan_in_the_probe_is_a_difference(three):
    folder = write_run(three / "flash", "flash", 1)
    edit(folder, lambda line: line | {"parity/grad_rel_err": "nan"} if line["step"] == 300 else line)
    assert row_of(only(three))["same weights"] == "infinitely many"
    assert "same weights: step 300, gradients of h.3.attn.c_attn.weight" in row_of(only(three))["where"]


def test_a_probe_speaks_of_its_reference_alone_also_where_that_did_not_run(tmp_path):
    write_run(tmp_path / "sdpa", "sdpa", 1, probe_every=0)
    assert judged(tmp_path) == []
    write_run(tmp_path / "flash", "flash", 1)
    write_run(tmp_path / "tiled", "tiled", 1, error="no_rescaling")
    tiled, _, flash = judged(tmp_path)
    assert (flash.outcome, flash.gaps) == (Outcome.open, (Gap.no_reference,))
    assert tiled.outcome is Outcome.broken
    assert {Gap.no_probe in verdict.gaps for verdict in judged(tmp_path, "sdpa")} == {True}
    write_run(tmp_path / "longer", "flash", 1, seq_len=512, probe_every=0)
    assert len(judged(tmp_path)) == 3  # nothing is compared with that one


def test_an_interrupted_run_is_compared_as_far_as_it_got(three):
    write_run(three / "flash", "flash", 1, status="interrupted", stop=230)
    verdict = only(three)
    assert verdict.curve.step <= 230
    ours, theirs = (read_run(three / name).series("val/loss").values[4] for name in ("flash", "naive-1"))
    assert verdict.final.difference == abs(ours - theirs)  # at step 200, the last evaluation that both have
    assert verdict.outcome is Outcome.holds


def test_the_spread_is_the_distance_of_every_pair_of_seeds(three):
    runs = runs_in(three)
    spread: Any = seed_spread(runs)
    curves = np.array([run.series("train/loss").values for run in runs])
    squares = [(a - b) ** 2 for a, b in itertools.combinations(curves, 2)]
    half = window_of(curves.shape[1]) // 2
    expected = [np.sqrt(np.mean([s[max(0, n - half) : n + half + 1] for s in squares])) for n in range(len(squares[0]))]
    np.testing.assert_allclose(spread.values, expected)


def shift(folder: Path, metric: str, by: float, after: int = -1) -> None:
    def change(line):
        return line | {metric: line[metric] + by} if metric in line and line["step"] > after else line

    edit(folder, change)
