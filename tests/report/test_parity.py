"""The verdict on made-up run folders, of which the generator knows what is right and what is wrong."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from report.evidence import rolling_rms, seed_band, window_of
from report.parity import Judgement, Outcome, Verdict, judge
from report.runs import find_runs
from report.tables import judgement_table
from tests.report.synthetic import ERRORS, write_run
from training.step import NonFiniteError, Trainer


def sweep(folder: Path, seeds: tuple[int, ...] = (1, 2, 3), other: str = "flash", **options: object) -> Verdict:
    """naive and one other implementation, which the options are for, with the same seeds."""
    shared = {key: value for key, value in options.items() if key in ("precision", "steps", "log_every")}
    for seed in seeds:
        write_run(folder / f"naive-{seed}", "naive", seed, **shared)  # type: ignore[arg-type]
        write_run(folder / f"{other}-{seed}", other, seed, **options)  # type: ignore[arg-type]
    return judge(find_runs([folder]).runs)


def only(verdict: Verdict) -> Judgement:
    (judgement,) = verdict.judgements
    return judgement


@pytest.mark.parametrize(("precision", "chaos"), [("bf16", 1), ("bf16", 100), ("fp32", 1), ("fp32", 100)])
def test_a_right_implementation_is_not_accused_in_20_runs(tmp_path: Path, precision: str, chaos: float) -> None:
    for n in range(20):
        seeds = (3 * n, 3 * n + 1, 3 * n + 2) if n % 2 else (2 * n, 2 * n + 1)
        verdict = sweep(tmp_path / str(n), seeds, precision=precision, chaos=chaos)
        assert verdict.holds, f"seeds {seeds}: {verdict.sentence}"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_wrong_implementation_is_caught(tmp_path: Path, error: str, precision: str) -> None:
    for n in range(5):
        verdict = sweep(tmp_path / str(n), (n, n + 10), error=error, precision=precision)
        assert verdict.holds is False
        assert verdict.sentence.startswith("Parity is broken for flash: at the same weights")
        assert only(verdict).probe.ratio > 10  # type: ignore[union-attr]


def test_the_verdict_names_its_numbers(tmp_path: Path) -> None:
    verdict = sweep(tmp_path)
    judgement = only(verdict)
    assert judgement.outcome is Outcome.holds
    assert judgement.seeds == (1, 2, 3)
    assert judgement.curve is not None
    assert judgement.final is not None
    assert judgement.probe is not None
    assert judgement.probe.checks == 3 * 4
    for number in (judgement.curve.ratio, judgement.final.difference, judgement.final.floor, judgement.probe.ratio):
        assert f"{number:.2g}" in verdict.sentence
    assert "naive's 3 seeds" in verdict.sentence


def test_small_numbers_are_powers_of_ten_in_the_verdict_as_in_the_table(tmp_path: Path) -> None:
    verdict = sweep(tmp_path, precision="fp32")
    judgement = only(verdict)
    assert judgement.curve.ratio < 1e-4  # type: ignore[union-attr, operator]
    (row,) = judgement_table([judgement], "naive").rows
    share = row[3]
    assert "·10⁻" in share
    assert f"(at most {share} of their distance, which is 0." in verdict.sentence
    assert not re.search(r"\de-\d", verdict.sentence)


def test_without_a_probe_rounding_is_not_claimed(tmp_path: Path) -> None:
    verdict = sweep(tmp_path, probe_every=0)
    assert verdict.holds is None
    assert "no probe ran" in verdict.sentence
    assert "not claimed" in verdict.sentence
    # What lies within the seeds' distance cannot be told from a right implementation without the probe.
    wrong = sweep(tmp_path / "wrong", probe_every=0, error="mask_ignores_layer")
    assert wrong.holds is None


def test_a_single_seed_gives_no_band_and_the_verdict_says_so(tmp_path: Path) -> None:
    verdict = sweep(tmp_path, (1,))
    assert verdict.holds is None
    assert "no band could be measured from a single seed of naive" in verdict.sentence
    assert "at the same weights the difference is" in verdict.sentence
    assert sweep(tmp_path / "wrong", (1,), error="scale").holds is False  # the probe needs no band


def test_a_curve_further_away_than_the_seeds_are_is_broken_even_where_no_probe_ran(tmp_path: Path) -> None:
    shift_training_loss(write_run(tmp_path / "flash", "flash", 1, probe_every=0), 0.4, after=200)
    for seed in (1, 2, 3):
        write_run(tmp_path / f"naive-{seed}", "naive", seed)
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is False
    assert "the distance between seeds" in verdict.sentence
    assert only(verdict).curve.step > 200  # type: ignore[union-attr]


def test_a_final_loss_beyond_the_floor_is_broken_though_the_probe_agrees(tmp_path: Path) -> None:
    """As where the compiled path is wrong and the probe's, uncompiled, is right."""
    for seed in (1, 2, 3):
        write_run(tmp_path / f"naive-{seed}", "naive", seed, precision="fp32")
        shift_validation_loss(write_run(tmp_path / f"flash-{seed}", "flash", seed, precision="fp32"), 0.02)
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is False
    assert "final validation loss differs by 0.02 where" in verdict.sentence
    assert only(verdict).probe.agrees  # type: ignore[union-attr]


def test_rounding_that_training_amplified_is_told_from_an_error_by_how_it_began(tmp_path: Path) -> None:
    """Both end as far from the reference, about as far as two seeds are from each other."""
    chaotic = sweep(tmp_path / "chaotic", precision="fp32", chaos=100)
    final = only(chaotic).final
    assert final is not None
    assert final.difference > final.floor > 0  # type: ignore[operator]
    assert chaotic.holds
    assert "rounding that training has amplified" in chaotic.sentence
    for seed in (1, 2, 3):
        write_run(tmp_path / "wrong" / f"naive-{seed}", "naive", seed, precision="fp32")
        folder = write_run(tmp_path / "wrong" / f"flash-{seed}", "flash", seed, precision="fp32")
        shift_validation_loss(folder, final.difference)
    assert judge(find_runs([tmp_path / "wrong"]).runs).holds is False


def test_curves_that_cross_are_no_evidence_against_an_implementation(tmp_path: Path) -> None:
    """Where the seeds' losses happen to be equal at a step, their distance there is zero, and no difference passes."""
    for seed in (1, 2):
        write_run(tmp_path / f"flash-{seed}", "flash", seed)
        write_run(tmp_path / f"naive-{seed}", "naive", seed)
    first = (tmp_path / "naive-1" / "metrics.jsonl").read_text().splitlines()
    second = (tmp_path / "naive-2" / "metrics.jsonl").read_text().splitlines()
    crossing = json.loads(second[20]) | {"train/loss": json.loads(first[20])["train/loss"]}
    second[20] = json.dumps(crossing)
    twin = (tmp_path / "flash-2" / "metrics.jsonl").read_text().splitlines()
    twin[20] = json.dumps(json.loads(twin[20]) | {"train/loss": crossing["train/loss"] + 1e-4})
    (tmp_path / "naive-2" / "metrics.jsonl").write_text("\n".join(second))
    (tmp_path / "flash-2" / "metrics.jsonl").write_text("\n".join(twin))
    assert judge(find_runs([tmp_path]).runs).holds


def test_a_run_that_comes_to_nan_where_the_reference_does_not_is_broken(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"naive-{seed}", "naive", seed)
    write_run(tmp_path / "tiled", "tiled", 1, status="failed", stop=120, message=not_finite_at(126))
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is False
    assert "its loss is not finite at step 126 with seed 1, where naive's is" in verdict.sentence


def test_a_step_that_no_message_names_is_the_one_after_the_last_that_was_logged(tmp_path: Path) -> None:
    write_run(tmp_path / "naive", "naive", 1)
    write_run(tmp_path / "tiled", "tiled", 1, status="failed", stop=120, message="the loss is not finite")
    assert "not finite at step 121 with seed 1" in judge(find_runs([tmp_path]).runs).sentence


@pytest.mark.parametrize("naive", [{"status": "interrupted", "stop": 100}, {"status": "failed", "stop": 120}])
def test_a_run_is_not_broken_where_the_reference_did_not_come_past_the_step(tmp_path: Path, naive: dict) -> None:
    write_run(tmp_path / "naive", "naive", 1, **naive, message=not_finite_at(126))
    write_run(tmp_path / "tiled", "tiled", 1, status="failed", stop=120, message=not_finite_at(126))
    assert judge(find_runs([tmp_path]).runs).holds is None


def test_where_the_reference_did_not_run_an_ablated_one_is_broken_by_its_intact_self(tmp_path: Path) -> None:
    """As experiment=break_it leaves its runs: both are probed, and the probe sees nothing before the overflow."""
    ablated = {"attention.ablate": "no_max_subtraction"}
    write_run(tmp_path / "0", "tiled", 7)
    write_run(tmp_path / "1", "tiled", 7, status="failed", stop=120, message=not_finite_at(121), overrides=ablated)
    judged = {j.label: j for j in judge(find_runs([tmp_path]).runs).judgements}
    broken = judged["tiled no_max_subtraction"]
    assert broken.outcome is Outcome.broken
    assert broken.objections == ("its loss is not finite at step 121 with seed 7, where the intact tiled's is",)
    assert judged["tiled"].outcome is Outcome.open


def test_an_ablated_run_says_nothing_against_another(tmp_path: Path) -> None:
    write_run(tmp_path / "0", "tiled", status="failed", stop=120, message=not_finite_at(121))
    write_run(tmp_path / "1", "tiled", overrides={"attention.ablate": "no_rescaling"})
    assert {j.outcome for j in judge(find_runs([tmp_path]).runs).judgements} == {Outcome.open}


def test_a_nan_in_the_probe_is_a_difference(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "flash", "flash", 1)
    edit(folder, lambda line: line | {"parity/grad_rel_err": "nan"} if line["step"] == 300 else line)
    write_run(tmp_path / "naive", "naive", 1)
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is False
    assert "step 300" in verdict.sentence


def test_the_probe_alone_speaks_where_the_reference_did_not_run(tmp_path: Path) -> None:
    write_run(tmp_path / "flash", "flash", 1)
    write_run(tmp_path / "tiled", "tiled", 1, error="no_rescaling")
    flash, tiled = sorted(judge(find_runs([tmp_path]).runs).judgements, key=lambda j: j.label)
    assert flash.outcome is Outcome.open
    assert "naive did not run" in flash.missing[0]
    assert tiled.outcome is Outcome.broken


def test_a_reference_that_ran_elsewhere_is_not_said_not_to_have_run(tmp_path: Path) -> None:
    write_run(tmp_path / "flash", "flash", 1)
    write_run(tmp_path / "naive", "naive", 1, device="cpu")
    judgement = only(judge(find_runs([tmp_path]).runs))
    assert judgement.missing == ("no run of naive shares its configuration (device, settings)",)


def test_a_probe_of_another_reference_is_not_said_not_to_have_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"sdpa-{seed}", "sdpa", seed, probe_every=0)
        write_run(tmp_path / f"flash-{seed}", "flash", seed)
    verdict = judge(find_runs([tmp_path]).runs, reference="sdpa")
    assert "the probe compared with naive, not sdpa (parity.reference)" in verdict.sentence
    assert "no probe ran" not in verdict.sentence


def test_seeds_of_the_reference_that_logged_nothing_are_not_said_to_be_one(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"flash-{seed}", "flash", seed)
        folder = write_run(tmp_path / f"naive-{seed}", "naive", seed)
        if seed == 2:
            (folder / "metrics.jsonl").write_text("")
    verdict = judge(find_runs([tmp_path]).runs)
    assert "fewer than two seeds of naive logged losses" in verdict.sentence
    assert "single seed" not in verdict.sentence


def test_seeds_that_the_reference_did_not_run_with_are_not_compared(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"naive-{seed}", "naive", seed)
    write_run(tmp_path / "flash", "flash", 3)
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is None
    assert "shares no seed with naive" in verdict.sentence


def test_without_losses_to_compare_a_good_probe_is_not_enough(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"naive-{seed}", "naive", seed)
        folder = write_run(tmp_path / f"flash-{seed}", "flash", seed)
        edit(folder, lambda line: {key: value for key, value in line.items() if not key.endswith("/loss")})
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is None
    assert "logged no loss" in verdict.sentence


def test_dropout_that_draws_its_own_masks_is_not_judged(tmp_path: Path) -> None:
    dropout = {"attention.dropout": 0.1}
    for seed in (1, 2):
        write_run(tmp_path / f"naive-{seed}", "naive", seed, overrides=dropout)
        write_run(
            tmp_path / f"sdpa-{seed}", "sdpa", seed, overrides=dropout | {"attention.rng": "torch"}, error="scale"
        )
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is None
    assert "draws dropout masks of its own" in verdict.sentence


def test_an_interrupted_run_is_compared_as_far_as_it_got(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path / f"naive-{seed}", "naive", seed)
    write_run(tmp_path / "flash", "flash", 1, status="interrupted", stop=230)
    judgement = only(judge(find_runs([tmp_path]).runs))
    assert judgement.curve is not None
    assert judgement.final is not None
    assert judgement.curve.last_step == 230
    assert judgement.final.step == 200  # the last evaluation that both have
    assert judgement.outcome is Outcome.holds


def test_each_configuration_is_judged_by_itself(tmp_path: Path) -> None:
    for batch_size, error in ((12, None), (24, "scale")):
        for seed in (1, 2):
            folder = tmp_path / f"{batch_size}-{seed}"
            write_run(folder / "naive", "naive", seed, batch_size=batch_size)
            write_run(folder / "flash", "flash", seed, batch_size=batch_size, error=error)
    verdict = judge(find_runs([tmp_path]).runs)
    outcomes = {j.group.runs[0].option("training.batch_size"): j.outcome for j in verdict.judgements}
    assert outcomes == {12: Outcome.holds, 24: Outcome.broken}
    assert "flash at training.batch_size 24" in verdict.sentence
    assert "it holds for flash at training.batch_size 12" in verdict.sentence


def test_there_is_no_verdict_without_something_to_compare(tmp_path: Path) -> None:
    write_run(tmp_path / "naive", "naive", 1)
    assert "naive ran alone" in judge(find_runs([tmp_path]).runs).sentence
    write_run(tmp_path / "flash", "flash", 1, seq_len=512, probe_every=0)
    verdict = judge(find_runs([tmp_path]).runs)
    assert verdict.holds is None
    assert verdict.sentence == "There is no verdict: no run of naive shares its configuration with flash."


def test_the_band_is_the_distance_of_every_pair_of_seeds(tmp_path: Path) -> None:
    for seed in (1, 2, 3, 4):
        write_run(tmp_path / str(seed), "naive", seed, steps=100)
    runs = find_runs([tmp_path]).runs
    band = seed_band(runs)
    assert band is not None
    assert band.seeds == (1, 2, 3, 4)

    curves = np.array([run.series("train/loss").values for run in runs])
    squares = [(a - b) ** 2 for a, b in itertools.combinations(curves, 2)]
    half = window_of(curves.shape[1]) // 2
    expected = [np.sqrt(np.mean([s[max(0, n - half) : n + half + 1] for s in squares])) for n in range(len(squares[0]))]
    np.testing.assert_allclose(band.train.values, expected)

    finals = np.array([run.series("val/loss").values[1:] for run in runs])  # steps 50 and 100; not before training
    pairs = [np.mean((a[1:] - b[1:]) ** 2) for a, b in itertools.combinations(finals, 2)]
    assert band.final["val/loss"] == pytest.approx(np.sqrt(np.mean(pairs)))


def test_rolling_rms_is_the_root_mean_square_of_each_window() -> None:
    values = np.random.default_rng(0).normal(size=23)
    for window in (1, 5, 9):
        half = window // 2
        expected = [np.sqrt(np.mean(values[max(0, n - half) : n + half + 1] ** 2)) for n in range(len(values))]
        np.testing.assert_allclose(rolling_rms(values, window), expected)


def test_the_reference_may_be_another_implementation(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"sdpa-{seed}", "sdpa", seed, overrides={"parity.reference": "sdpa"})
        write_run(tmp_path / f"flash-{seed}", "flash", seed, overrides={"parity.reference": "sdpa"})
    verdict = judge(find_runs([tmp_path]).runs, reference="sdpa")
    assert [j.label for j in verdict.judgements] == ["flash"]
    assert verdict.holds
    assert judge(find_runs([tmp_path]).runs).judgements == ()  # a probe against sdpa says nothing of naive


def not_finite_at(step: int) -> str:
    """What train.py leaves as the message of a run that stopped there."""
    with pytest.raises(NonFiniteError) as stopped:
        Trainer.raise_failure(SimpleNamespace(failure=torch.tensor([step - 1, math.nan, math.nan])))  # type: ignore[arg-type]
    return str(stopped.value)


def edit(folder: Path, change: object) -> None:
    """Rewrite each line of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]  # type: ignore[operator]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def shift_training_loss(folder: Path, by: float, after: int) -> None:
    def change(line: dict[str, float]) -> dict[str, float]:
        shifted = "train/loss" in line and line["step"] > after
        return line | {"train/loss": line["train/loss"] + by} if shifted else line

    edit(folder, change)


def shift_validation_loss(folder: Path, by: float) -> None:
    edit(folder, lambda line: line | {"val/loss": line["val/loss"] + by} if "val/loss" in line else line)
