"""Headlines and tables over lengths and settings, against the laws of the synthetic runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from recipe.compare.costs import crossovers, ranking, same_tokens
from recipe.compare.headline import Headline, headline
from recipe.compare.parity import judge
from recipe.compare.sweeps import labels_of
from recipe.compare.tables import ablation_table, cell_table, run_table
from tests.recipe.compare.reading import only_sweep, rows_of, runs_in
from tests.recipe.compare.synthetic import write_run


def headline_of(folder: Path) -> Headline:
    sweep = only_sweep(folder)
    return headline(sweep, judge(sweep.cells), "naive")


def write_losses(folder: Path, losses: Mapping[float, tuple[float, ...]]) -> None:
    """Runs whose final losses are these, by learning rate and seed."""
    for lr, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            measured = {"val_loss": loss}
            changed = {"optimizer.lr": lr}
            write_run(folder / f"{lr}-{seed}", "flash", seed, overrides=changed, probe_every=0, summary=measured)


def write_speed(folder: Path, attention: str, seq_len: int, speed: float, **more: Any) -> None:
    shape = {"steps": 10, "seq_len": seq_len, "probe_every": 0} | more
    write_run(folder / f"{attention}-{seq_len}", attention, tokens_per_s=speed, **shape)


def write_wall(folder: Path) -> None:
    """naive fits up to 2,048 tokens and trains 1e8 / T tokens per second, flash 1e5."""
    for seq_len in (512, 1024, 2048, 4096, 8192):
        for attention, speed in (("naive", 1e8 / seq_len), ("flash", 1e5)):
            fits = attention == "flash" or seq_len <= 2048
            ended: dict[str, Any] = {} if fits else {"status": "out_of_memory", "stop": 0}
            write_speed(folder, attention, seq_len, speed, **ended)


def test_out_of_memory_is_a_data_point_and_a_run_killed_before_its_first_step_fits_nothing(tmp_path):
    write_wall(tmp_path)
    assert headline_of(tmp_path) == ("The longest sequence that fits: 8,192 tokens, with flash", "none")
    rows = [row for row in rows_of(cell_table(only_sweep(tmp_path))) if row["implementation"] == "naive"]
    assert [row["outcome"] for row in rows] == ["-", "-", "-", "out of memory", "out of memory"]
    assert [row["tokens/s"] == "-" for row in rows] == [False, False, False, True, True]
    (tmp_path / "flash-8192" / "summary.json").unlink()
    (tmp_path / "flash-8192" / "metrics.jsonl").write_text("")
    assert headline_of(tmp_path).text == "The longest sequence that fits: 4,096 tokens, with flash"


def test_on_a_cpu_the_memory_is_that_of_one_layer(tmp_path):
    for seq_len in (512, 1024):
        write_run(tmp_path / str(seq_len), steps=10, seq_len=seq_len, summary={"memory_source": "attention"})
    assert "memory (one layer)" in rows_of(cell_table(only_sweep(tmp_path)))[0]


@pytest.mark.parametrize(
    ("speeds", "text"),
    [
        ({256: 1.5, 512: 0.5, 1024: 2.0, 2048: 3.0}, "flash is faster than naive from 1,024 tokens on"),
        ({256: 1.2, 512: 0.45}, "Nothing overtakes naive for good up to 512 tokens"),
        ({256: 2.0, 512: 4.0}, "flash is faster than naive from 256 tokens on"),
        ({256: 1.0, 512: 1.0}, "Nothing overtakes naive for good up to 512 tokens"),
        ({256: 0.5, 512: 1.0, 1024: 2.0}, "flash is faster than naive from 1,024 tokens on"),
    ],
)
def test_a_crossover_is_one_that_lasts(tmp_path, speeds, text):
    for seq_len, times in speeds.items():
        for attention, factor in (("naive", 1.0), ("flash", times)):
            write_speed(tmp_path, attention, seq_len, 1e4 * factor)
    assert headline_of(tmp_path) == (text, "none")


@pytest.mark.parametrize(("vary", "device", "found"), [(0.02, "cuda", 256), (0.3, "cuda", None), (0.02, "cpu", "none")])
def test_a_speed_within_the_spread_of_steps_overtakes_nothing_and_one_run_on_a_cpu_has_none(
    vary, device, found, tmp_path
):
    for seq_len in (256, 512):
        for attention, speed in (("naive", 1e4), ("flash", 1.3e4)):
            kind = {"device": {"type": device, "name": "it", "count": 1}}
            write_speed(tmp_path, attention, seq_len, speed, steps=400, vary=vary, summary=kind)
    assert crossovers(only_sweep(tmp_path)).get("flash", "none") == found


def test_contexts_are_compared_at_equal_tokens_only(tmp_path):
    for seq_len in (256, 512, 1024):
        run = tmp_path / "equal" / str(seq_len)
        loss = {"val_loss": 1000 / seq_len}
        write_run(run, "flash", steps=50, seq_len=seq_len, batch_size=4096 // seq_len, probe_every=0, summary=loss)
        write_run(tmp_path / "unequal" / str(seq_len), "flash", steps=50, seq_len=seq_len, probe_every=0)
    assert same_tokens(only_sweep(tmp_path / "equal"))
    assert headline_of(tmp_path / "equal").text.startswith("The lowest validation loss is undecided: seq_len=1024")
    assert not same_tokens(only_sweep(tmp_path / "unequal"))


def test_settings_are_ranked_by_their_loss_and_one_seed_names_no_winner(tmp_path):
    write_losses(tmp_path, {0.001: (3.5,), 0.003: (3.25,), 0.01: (4.0,)})
    failed = {"status": "failed", "stop": 100, "summary": {"val_loss": 3.0}}  # too early to compare
    write_run(tmp_path / "1", "flash", 0, overrides={"optimizer.lr": 1.0}, probe_every=0, **failed)  # type: ignore[arg-type]
    text, tone = headline_of(tmp_path)
    assert text.startswith("The lowest validation loss is undecided: optimizer.lr=0.003, optimizer.lr=0.001")
    assert (text.endswith("(one seed)"), tone) == (True, "open")
    rows = rows_of(cell_table(only_sweep(tmp_path)))
    assert [row["settings"] for row in rows] == [f"optimizer.lr={lr}" for lr in ("0.003", "0.001", "0.01", "1.0")]
    assert [row["to the lowest"] for row in rows] == ["-", "+0.2500", "+0.7500", "-"]


def test_differences_to_the_lowest_are_paired_and_hold_for_all_pairs_together(tmp_path):
    """Seeds are 0.2 apart, and the settings 0.03 at each seed: only pairs show that."""
    losses = {0.001: (3.0, 3.2, 3.1), 0.003: (3.031, 3.23, 3.129), 0.01: (3.5, 3.7, 3.6)}
    write_losses(tmp_path / "apart", losses)
    assert headline_of(tmp_path / "apart") == ("The lowest validation loss: optimizer.lr=0.001 (3 seeds)", "none")
    _, second, _ = ranking(only_sweep(tmp_path / "apart"))
    expected = stats.ttest_rel(losses[0.003], losses[0.001]).confidence_interval(1 - 0.05 / 3)
    assert second.interval == pytest.approx((expected.low, expected.high))
    rows = rows_of(cell_table(only_sweep(tmp_path / "apart")))
    assert rows[0]["val loss"] == "3.1000 ± 0.1"
    assert rows[1]["to the lowest"] == f"+0.0300 ({expected.low:+.4f} to {expected.high:+.4f})"
    write_losses(tmp_path / "near", {0.001: (3.0, 3.2, 3.1), 0.003: (3.2, 3.1, 3.09), 0.01: (5.0, 5.2, 5.1)})
    near = "The lowest validation loss is undecided: optimizer.lr=0.001, optimizer.lr=0.003 (3 seeds)"
    assert headline_of(tmp_path / "near") == (near, "open")


def test_the_headline_of_one_setting_is_its_loss_and_equal_runs_are_called_so(tmp_path):
    """The loss curves depend on the attention and the seed alone."""
    for seed, text in enumerate(("3.0000 (one seed)", f"3.5000 ± {math.sqrt(0.5):.2g} (2 seeds)")):
        write_run(tmp_path / "one" / str(seed), "flash", seed, probe_every=0, summary={"val_loss": 3.0 + seed})
        assert headline_of(tmp_path / "one").text == f"flash: validation loss {text}"
    for temperature in (1.0, 2.0):
        write_run(tmp_path / "equal" / f"{temperature}", steps=40, overrides={"score.temperature": temperature})
    text, _ = headline_of(tmp_path / "equal")
    assert text == "score.temperature=1.0 and score.temperature=2.0 are equal bit for bit (one seed)"
    assert rows_of(cell_table(only_sweep(tmp_path / "equal")))[1]["to the lowest"] == "equal bit for bit"


def test_variants_of_attention_are_judged_each_by_itself(tmp_path):
    for window in (None, 128):
        for name in ("naive", "flash"):
            for seed in (1, 2):
                error = "scale" if window and name == "flash" else None
                run = tmp_path / f"{name}-{window}-{seed}"
                write_run(run, name, seed, steps=100, overrides={"score.window": window}, error=error)
    assert headline_of(tmp_path).text == "Parity is broken for flash (window=128) and holds for flash (window=null)"


@pytest.mark.parametrize(("status", "stop"), [("failed", 40), ("out_of_memory", 0), ("interrupted", 0)])
def test_a_sweep_without_a_result_says_how_its_runs_ended(status, stop, tmp_path):
    for n in range(2):
        write_run(tmp_path / str(n), seed=n, status=status, stop=stop)
    assert headline_of(tmp_path) == (f"No run has completed with a loss ({status.replace('_', ' ')})", "broken")


def test_an_ablation_shows_its_effect_on_training_and_on_the_output(tmp_path):
    """Runs like those of experiment=break_it: measured in fp16 and fp32, trained in one precision."""
    entry = {"first_bad_tile": [0, 1], "first_bad_row": 3, "max_error": 3.2, "non_finite": False}
    stopped: dict[str, Any] = {"status": "failed", "stop": 30, "non_finite_step": 31}
    for ablate, ended in (("none", {}), ("no_rescaling", {}), ("no_max_subtraction", stopped)):
        measured = [entry | {"ablate": ablate, "dtype": dtype} for dtype in ("fp16", "fp32") if ablate != "none"]
        changed = {"attention.ablate": ablate}
        write_run(tmp_path / ablate, "tiled", overrides=changed, summary={"ablation": measured}, **ended)
    sweep = only_sweep(tmp_path)
    expected = "Trained without a line of the online softmax: no_max_subtraction and no_rescaling"
    assert headline_of(tmp_path).text == expected
    outcomes = {row["implementation"].split()[-1]: row["outcome"] for row in rows_of(cell_table(sweep))}
    assert outcomes == {"tiled": "-", "no_rescaling": "-", "no_max_subtraction": "not finite at step 31"}
    shown = [tuple(row.values()) for row in rows_of(ablation_table(sweep.runs))]
    assert ("no_rescaling", "fp16", "(0, 1)", "3", "finite", "3.2") in shown


def test_the_table_of_runs_shows_how_they_ended_and_the_loss_of_each_corpus(tmp_path):
    write_run(tmp_path / "1", "naive")
    failed = write_run(tmp_path / "2", "flash", status="failed", stop=40) / "metrics.jsonl"
    failed.write_text(f'{failed.read_text()}{{"step": 40, "val/loss/code": 2.5}}\n')
    runs = runs_in(tmp_path)
    rows = rows_of(run_table(runs, labels_of(runs), {"1": "lr=1", "2": ""}))
    assert [row["settings"] for row in rows] == ["lr=1", "-"]
    assert (rows[1]["status"], rows[1]["val loss of code"]) == ("failed at step 40", "2.5000")


def test_attention_of_another_function_is_ranked_by_loss_with_its_interval(tmp_path):
    """Its curves are further from naive's than seeds are from each other, which would break parity."""
    losses = {"naive": (3.5, 3.7, 3.6), "softpick": (3.0, 3.21, 3.1)}
    for name, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            measured = {"val_loss": loss, "attention_exact": name == "naive"}
            error = None if name == "naive" else "no_rescaling"
            write_run(tmp_path / f"{name}{seed}", name, seed, probe_every=0, error=error, summary=measured)
    expected = stats.ttest_rel(losses["naive"], losses["softpick"]).confidence_interval()
    interval = f"{expected.low:+.4f} to {expected.high:+.4f}"
    lowest = f"The lowest validation loss: softpick (3 seeds); naive +0.4967 ({interval})"
    assert headline_of(tmp_path) == (lowest, "none")
    write_run(tmp_path / "flash", "flash", 0, error="scale")
    text, tone = headline_of(tmp_path)
    assert text.startswith("Parity is broken for flash. The lowest validation loss")
    assert tone == "broken"
