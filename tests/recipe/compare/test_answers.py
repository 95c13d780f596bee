"""The report's conclusions over lengths, devices and settings, against the laws of the synthetic runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recipe.compare.costs import crossovers, points, predicted_memory, same_tokens
from recipe.compare.parity import judge
from recipe.compare.runs import find_runs
from recipe.compare.sweeps import Sweep, labels_of, sweeps_of
from recipe.compare.tables import ablation_table, cell_table, run_table
from recipe.compare.text import Answer, answer
from tests.recipe.compare.synthetic import write_run

GIB = 2**30
STATIC = 16 * 124_000_000 / GIB


def only_sweep(folder: Path) -> Sweep:
    (sweep,) = sweeps_of(find_runs([folder]).runs)
    return sweep


def answered(folder: Path) -> Answer:
    """The report's answer for the runs in a folder."""
    sweep = only_sweep(folder)
    return answer(sweep, judge(sweep.cells), "naive")


def write_wall(folder: Path, batch_size: int = 2) -> None:
    """Memory is a constant, 50 kB per token and, for naive, 600 bytes per score; naive fits up to 2,048 tokens."""
    for seq_len in (512, 1024, 2048, 4096, 8192):
        for attention, per_score in (("naive", 600), ("flash", 0)):
            tokens = batch_size * seq_len
            fits = attention == "flash" or seq_len <= 2048
            write_run(
                folder / f"{attention}-{seq_len}",
                attention,
                steps=10,
                seq_len=seq_len,
                batch_size=batch_size,
                probe_every=0,
                peak_gib=STATIC + (50_000 * tokens + per_score * tokens * seq_len) / GIB if fits else None,
                status="completed" if fits else "out_of_memory",
                stop=None if fits else 0,
                tokens_per_s=1e5 if attention == "flash" else 1e8 / seq_len,
            )


def test_memory_is_predicted_from_the_shortest_lengths(tmp_path: Path) -> None:
    write_wall(tmp_path)
    sweep = only_sweep(tmp_path)
    naive, flash = (dict(predicted_memory(sweep, label)) for label in ("naive", "flash"))
    for seq_len in (512, 1024, 2048, 4096, 8192):
        tokens = 2 * seq_len
        assert naive[seq_len] == pytest.approx(STATIC + (50_000 * tokens + 600 * tokens * seq_len) / GIB)
        assert flash[seq_len] == pytest.approx(STATIC + 50_000 * tokens / GIB)


def test_nothing_is_predicted_from_too_few_lengths(tmp_path: Path) -> None:
    for seq_len in (512, 1024):
        write_run(tmp_path / str(seq_len), "naive", steps=10, seq_len=seq_len, peak_gib=float(seq_len))
    assert predicted_memory(only_sweep(tmp_path), "naive") == []


def test_the_attention_alone_has_no_share_of_weights(tmp_path: Path) -> None:
    """3 + 2 T KiB for tiled, and 2 T KiB with T^2 / 2 KiB of scores for naive."""
    for seq_len in (128, 256, 512, 1024):
        for attention, kib in (("tiled", 3 + 2 * seq_len), ("naive", 2 * seq_len + seq_len**2 / 2)):
            memory = {"peak": {"memory/peak_allocated_gib": kib / 2**20}, "memory_source": "attention"}
            folder = tmp_path / f"{attention}-{seq_len}"
            write_run(folder, attention, steps=10, seq_len=seq_len, batch_size=1, summary=memory)
    sweep = only_sweep(tmp_path)
    assert dict(predicted_memory(sweep, "tiled"))[1024] * 2**20 == pytest.approx(3 + 2 * 1024)
    assert dict(predicted_memory(sweep, "naive"))[1024] * 2**20 == pytest.approx(2 * 1024 + 1024**2 / 2)


def test_nothing_is_predicted_where_the_batch_changes_with_the_length(tmp_path: Path) -> None:
    for seq_len in (256, 512, 1024):
        write_run(tmp_path / str(seq_len), "flash", steps=10, seq_len=seq_len, batch_size=4096 // seq_len, peak_gib=5.0)
    assert predicted_memory(only_sweep(tmp_path), "flash") == []


def test_out_of_memory_is_a_data_point(tmp_path: Path) -> None:
    write_wall(tmp_path)
    sweep = only_sweep(tmp_path)
    naive = points(sweep)["naive"]
    assert [point.position for point in naive if point.out_of_memory] == [4096, 8192]
    assert all(point.tokens_per_s is None for point in naive if point.out_of_memory)
    headline, tone, bullets = answered(tmp_path)
    assert (headline, tone) == ("The longest sequence that fits: 8,192 tokens, with flash", "none")
    assert bullets[0][1].startswith("It fits up to 2,048 tokens and runs out of memory at 4,096.")
    table = cell_table(sweep, [])
    assert table is not None
    assert [row[2] for row in table.rows if row[1] == "naive"] == ["-", "-", "-", "out of memory", "out of memory"]


def test_a_run_that_was_killed_before_its_first_step_fits_nothing(tmp_path: Path) -> None:
    write_wall(tmp_path)
    killed = tmp_path / "flash-8192"
    (killed / "summary.json").unlink()
    (killed / "metrics.jsonl").write_text("")
    assert answered(tmp_path).headline == "The longest sequence that fits: 4,096 tokens, with flash"


def test_on_a_cpu_the_memory_limit_and_the_counted_memory_are_explained(tmp_path: Path) -> None:
    for seq_len in (512, 1024):
        oom = {"status": "out_of_memory", "stop": 0, "peak_gib": None} if seq_len == 1024 else {"peak_gib": 0.2}
        limit = {"training.cpu_memory_gib": 2.0}
        attention = {"memory_source": None if seq_len == 1024 else "attention"}
        write_run(tmp_path / str(seq_len), steps=10, seq_len=seq_len, overrides=limit, summary=attention, **oom)
    bullets = dict(answered(tmp_path).bullets)
    assert bullets["naive"] == "It fits up to 512 tokens and runs out of memory at 1,024."
    assert bullets["training.cpu_memory_gib"].startswith("Stands for a GPU's memory: 2 GiB for the whole run.")
    table = cell_table(only_sweep(tmp_path), [])
    assert table is not None
    assert "memory (one layer)" in table.columns


def test_the_crossover_is_where_step_times_are_equal(tmp_path: Path) -> None:
    """naive at 1e8 / T tokens per second falls behind flash's 1e5 at T = 1,000."""
    write_wall(tmp_path)
    (crossing,) = crossovers(only_sweep(tmp_path))
    assert crossing.label == "flash"
    assert crossing.seq_len == pytest.approx(1000)
    assert crossing.longest == 2048  # naive has no time beyond
    assert crossing.speedup is not None
    assert crossing.speedup.median == pytest.approx(2.048)
    assert 2 < crossing.speedup.low < 2.048 < crossing.speedup.high < 2.1  # steps vary by 2 %


def write_speeds(folder: Path, speeds: dict[int, float]) -> None:
    """naive at 10,000 tokens per second at every length, and flash `speeds` times as fast."""
    for seq_len, times in speeds.items():
        for attention, factor in (("naive", 1.0), ("flash", times)):
            run = folder / f"{attention}{seq_len}"
            write_run(run, attention, steps=10, seq_len=seq_len, probe_every=0, tokens_per_s=1e4 * factor)


@pytest.mark.parametrize(
    ("speeds", "headline", "said"),
    [
        # Faster, slower, faster: half as fast at 512 and twice as fast at 1,024, so equal at their geometric mean.
        (
            {256: 1.5, 512: 0.5, 1024: 2.0, 2048: 3.0},
            "flash overtakes naive at about 724 tokens",
            "It overtakes naive at about 724 tokens and is 3 times as fast at 2,048.",
        ),
        (
            {256: 1.2, 512: 0.45},
            "Nothing overtakes naive for good up to 512 tokens",
            "It does not overtake naive for good and is 0.45 (0.45 to 0.46) times as fast at 512.",
        ),
        (
            {256: 2.0, 512: 4.0},
            "flash overtakes naive at 256 tokens or fewer",
            "It is faster than naive from the shortest length on, 256 tokens, and is 4 times as fast at 512.",
        ),
        (
            {256: 1.0, 512: 1.0},
            "Nothing overtakes naive for good up to 512 tokens",
            "It does not overtake naive for good and their speeds do not differ measurably at 512.",
        ),
        # As fast at 512 and faster beyond: the two are equal at 512.
        (
            {256: 0.5, 512: 1.0, 1024: 2.0},
            "flash overtakes naive at about 512 tokens",
            "It overtakes naive at about 512 tokens and is 2 times as fast at 1,024.",
        ),
    ],
)
def test_a_crossover_is_one_that_lasts(tmp_path: Path, speeds: dict[int, float], headline: str, said: str) -> None:
    write_speeds(tmp_path, speeds)
    assert answered(tmp_path) == (headline, "none", [("flash", said)])


def test_contexts_are_compared_at_equal_tokens_only(tmp_path: Path) -> None:
    for seq_len in (256, 512, 1024):
        write_run(
            tmp_path / str(seq_len), "flash", steps=50, seq_len=seq_len, batch_size=4096 // seq_len, probe_every=0
        )
    assert same_tokens(only_sweep(tmp_path))
    assert re.match(r"The lowest validation loss: [\d,]+ tokens of context", answered(tmp_path).headline)
    for seq_len in (256, 512):
        write_run(tmp_path / "unequal" / str(seq_len), "flash", steps=50, seq_len=seq_len, probe_every=0)
    assert not same_tokens(only_sweep(tmp_path / "unequal"))


def test_settings_are_ranked_by_their_loss_and_parity_is_not_spoken_of(tmp_path: Path) -> None:
    lowest = {"0.001": 3.5, "0.003": 3.25, "0.01": 4.0}
    for lr, loss in lowest.items():
        write_run(tmp_path / lr, overrides={"optimizer.lr": float(lr)}, summary={"val_loss": loss})
    failed = {"status": "failed", "stop": 100, "summary": {"val_loss": 3.0}}  # too early to compare
    write_run(tmp_path / "1", overrides={"optimizer.lr": 1.0}, **failed)  # type: ignore[arg-type]
    headline, _, bullets = answered(tmp_path)
    assert headline == "The lowest validation loss: optimizer.lr=0.003 (one seed each)"
    assert bullets == [
        ("optimizer.lr=0.003", "Validation loss 3.2500."),
        ("optimizer.lr=0.001", "Next, 0.2500 higher."),
    ]
    table = cell_table(only_sweep(tmp_path), [])
    assert table is not None
    assert [row[0] for row in table.rows] == [f"optimizer.lr={lr}" for lr in ("0.003", "0.001", "0.01", "1.0")]


def test_devices_are_compared_by_their_throughput(tmp_path: Path) -> None:
    for devices, speed in ((1, 1e5), (4, 3e5)):
        write_run(
            tmp_path / str(devices),
            "flash",
            devices=devices,
            batch_size=12 // devices,
            probe_every=0,
            tokens_per_s=speed,
        )
    headline, _, bullets = answered(tmp_path)
    assert headline == "4 devices train 3 (2.9 to 3.1) times as fast as 1"
    assert bullets == [("flash", "4 devices train 3 (2.9 to 3.1) times as fast as 1, 75 % of proportional.")]


@pytest.mark.parametrize(
    ("device", "seeds", "vary", "said"),
    [
        ("cuda", 1, 0.02, "It trains 1.3 times as fast as naive. It takes 100 % of the memory."),
        ("cuda", 1, 0.1, "It trains 1.3 (1.1 to 1.6) times as fast as naive."),
        ("cuda", 1, 0.3, "Its speed does not differ measurably from naive's: steps vary by more."),
        ("cpu", 1, 0.02, "Its speed is not compared: on a CPU one run of each says little; train several seeds."),
        ("cpu", 2, 0.02, "It trains 1.3 times as fast as naive."),
    ],
)
def test_a_speed_is_given_with_its_spread_or_not_at_all(
    device: str, seeds: int, vary: float, said: str, tmp_path: Path
) -> None:
    for attention, speed in (("naive", 1e4), ("flash", 1.3e4)):
        for seed in range(seeds):
            write_run(
                tmp_path / f"{attention}-{seed}", attention, seed, probe_every=0, tokens_per_s=speed, vary=vary,
                summary={"device": {"type": device, "name": "it", "count": 1}},
            )  # fmt: skip
    (told,) = (sentences for label, sentences in answered(tmp_path).bullets if label == "flash")
    assert said in told
    assert "times as fast" in said or "times as fast" not in told


def test_speeds_on_a_cpu_whose_load_changed_between_seeds_do_not_differ_measurably(tmp_path: Path) -> None:
    for n, (attention, speed) in enumerate((("naive", 1e4), ("flash", 1.3e4), ("naive", 2e4), ("flash", 1.2e4))):
        cpu = {"device": {"type": "cpu", "name": "it", "count": 1}}
        write_run(tmp_path / str(n), attention, seed=n // 2, probe_every=0, tokens_per_s=speed, summary=cpu)
    assert "does not differ measurably from naive's" in dict(answered(tmp_path).bullets)["flash"]


def test_a_sweep_over_seeds_shows_the_mean_and_the_deviation_and_says_so(tmp_path: Path) -> None:
    losses = {0.001: (3.0, 3.2, 3.1), 0.003: (3.05, 3.3, 3.2)}
    for lr, of_seeds in losses.items():
        for seed, loss in enumerate(of_seeds):
            changed = {"optimizer.lr": lr}
            measured = {"val_loss": loss}
            write_run(tmp_path / f"{lr}-{seed}", "flash", seed, overrides=changed, probe_every=0, summary=measured)
    headline, _, bullets = answered(tmp_path)
    assert headline == "The lowest validation loss: optimizer.lr=0.001 (means of 3 seeds)"
    assert bullets == [
        ("optimizer.lr=0.001", "Validation loss 3.1000 ± 0.1."),
        ("optimizer.lr=0.003", "Next, 0.0833 higher, less than the spread between seeds."),
    ]
    table = cell_table(only_sweep(tmp_path), [])
    assert table is not None
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["seeds"], row["val loss"]) for row in rows] == [("3", "3.1000 ± 0.1"), ("3", "3.1833 ± 0.13")]
    assert "Losses: mean over seeds ± standard deviation of one." in table.caption


@pytest.mark.parametrize(
    ("seeds", "said"), [(1, r"\(one seed\)"), (2, r"± [\d.]+ \(mean ± standard deviation of 2 seeds\)")]
)
def test_the_headline_of_one_setting_names_the_number_of_seeds(seeds: int, said: str, tmp_path: Path) -> None:
    for seed in range(seeds):
        write_run(tmp_path / str(seed), "flash", seed, probe_every=0)
    assert re.fullmatch(rf"flash: validation loss [\d.]+ {said}", answered(tmp_path).headline)


def test_variants_of_attention_are_judged_each_by_itself(tmp_path: Path) -> None:
    for window in (None, 128):
        for name in ("naive", "flash"):
            for seed in (1, 2):
                error = "scale" if window and name == "flash" else None
                run = tmp_path / f"{name}-{window}-{seed}"
                write_run(run, name, seed, steps=100, overrides={"score.window": window}, error=error)
    assert answered(tmp_path).headline == ("Parity is broken for flash (window=128) and holds for flash (window=null)")


@pytest.mark.parametrize("steps", [0, 40])
def test_a_sweep_in_which_every_run_failed_says_so(steps: int, tmp_path: Path) -> None:
    for n in range(3):
        write_run(tmp_path / str(n), seed=n, status="failed", stop=steps, message="Step 1 was not finite.")
    assert answered(tmp_path) == ("All 3 runs failed", "broken", [("run 0, run 1, run 2", "Step 1 was not finite.")])


def test_a_sweep_in_which_every_run_ran_out_of_memory_says_so(tmp_path: Path) -> None:
    for n, name in enumerate(("naive", "tiled")):
        write_run(tmp_path / str(n), name, status="out_of_memory", stop=0, message="The memory ended.")
    assert answered(tmp_path) == ("Both runs ran out of memory", "broken", [("run 0, run 1", "The memory ended.")])


def test_an_interrupted_run_without_a_loss_is_called_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", status="interrupted", stop=0)
    assert answered(tmp_path) == ("No run has completed with a loss", "broken", [("a", "It was interrupted.")])


def write_ablated(folder: Path, ablate: str, precision: str, **options: Any) -> None:
    """A run like those of experiment=break_it: measured in fp16 and fp32, trained in one precision."""
    entry = {"first_bad_tile": [0, 1], "first_bad_row": 3, "max_error": 3.2, "non_finite": False, "ablate": ablate}
    measured = [] if ablate == "none" else [entry | {"dtype": dtype} for dtype in ("fp16", "fp32")]
    changed = {"attention.ablate": ablate}
    write_run(folder, "tiled", precision=precision, overrides=changed, summary={"ablation": measured}, **options)


def test_an_ablation_is_answered_with_its_effect_on_training(tmp_path: Path) -> None:
    write_ablated(tmp_path / "0", "none", "fp32")
    write_ablated(tmp_path / "1", "no_rescaling", "fp32", error="no_rescaling")
    write_ablated(tmp_path / "2", "no_max_subtraction", "fp32", status="failed", stop=30, non_finite_step=31)
    sweep = only_sweep(tmp_path)
    intact, ablated = (run.series("val/loss").values[-1] for run in sweep.runs[:2])
    headline, _, bullets = answered(tmp_path)
    assert headline == "no_rescaling trains on and no_max_subtraction overflows"
    assert bullets == [
        (
            "no_rescaling",
            f"In fp32, the validation loss is {ablated:.4f}, {ablated - intact:+.4f} from the intact tiled's.",
        ),
        ("no_max_subtraction", "In fp32, the loss is not finite at step 31."),
    ]
    table = ablation_table(sweep.runs)
    assert table is not None
    assert table.rows[0] == ("no_rescaling", "fp16", "(0, 1)", "3", "finite", "3.2")


def test_the_table_of_runs_shows_the_settings_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "1", "naive")
    write_run(tmp_path / "2", "flash", status="failed", stop=40)
    runs = find_runs([tmp_path]).runs
    table = run_table(runs, labels_of(runs), {"1": "lr=1", "2": ""})
    assert table.columns[:5] == ("run", "implementation", "settings", "seed", "status")
    assert [row[2] for row in table.rows] == ["lr=1", "-"]
    assert table.rows[1][4] == "failed at step 40"
