"""What the report derives over lengths, against laws that the made-up runs were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report.findings import findings
from report.groups import Family, family_runs
from report.runs import find_runs
from report.scaling import crossovers, longest_that_fits, points, predicted_memory, same_tokens
from report.tables import ablation_table, block_table, context_table, crossover_table, run_table, wall_table
from tests.report.synthetic import write_run

GIB = 2**30
STATIC = 16 * 124_000_000 / GIB


def only_family(folder: Path) -> Family:
    (family,) = family_runs(find_runs([folder]).runs)
    return family


def write_wall(folder: Path, batch_size: int = 2) -> None:
    """Memory by the law: static, 50 kB a token, and for naive 600 bytes a score; naive fits up to 2,048 tokens."""
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
    family = only_family(tmp_path)
    naive, flash = (dict(predicted_memory(family, label)) for label in ("naive", "flash"))
    for seq_len in (512, 1024, 2048, 4096, 8192):
        tokens = 2 * seq_len
        assert naive[seq_len] == pytest.approx(STATIC + (50_000 * tokens + 600 * tokens * seq_len) / GIB)
        assert flash[seq_len] == pytest.approx(STATIC + 50_000 * tokens / GIB)


def test_nothing_is_predicted_from_too_few_lengths(tmp_path: Path) -> None:
    for seq_len in (512, 1024):
        write_run(tmp_path / str(seq_len), "naive", steps=10, seq_len=seq_len, peak_gib=float(seq_len))
    assert predicted_memory(only_family(tmp_path), "naive") == []


def test_the_attention_alone_has_no_share_of_weights(tmp_path: Path) -> None:
    """3 + 2 T KiB with tiles, and T^2 / 2 KiB of scores on top without."""
    for seq_len in (128, 256, 512, 1024):
        for attention, kib in (("tiled", 3 + 2 * seq_len), ("naive", 2 * seq_len + seq_len**2 / 2)):
            memory = {"peak": {"memory/peak_allocated_gib": kib / 2**20}, "memory_source": "attention"}
            folder = tmp_path / f"{attention}-{seq_len}"
            write_run(folder, attention, steps=10, seq_len=seq_len, batch_size=1, summary=memory)
    family = only_family(tmp_path)
    assert dict(predicted_memory(family, "tiled"))[1024] * 2**20 == pytest.approx(3 + 2 * 1024)
    assert dict(predicted_memory(family, "naive"))[1024] * 2**20 == pytest.approx(2 * 1024 + 1024**2 / 2)


def test_memory_at_equal_tokens_is_predicted_constant_for_tiles(tmp_path: Path) -> None:
    for seq_len in (256, 512, 1024):
        write_run(tmp_path / str(seq_len), "flash", steps=10, seq_len=seq_len, batch_size=4096 // seq_len, peak_gib=5.0)
    assert predicted_memory(only_family(tmp_path), "flash") == [(256, 5.0), (512, 5.0), (1024, 5.0)]


def test_out_of_memory_is_a_data_point(tmp_path: Path) -> None:
    write_wall(tmp_path)
    family = only_family(tmp_path)
    naive = points(family)["naive"]
    assert [point.seq_len for point in naive if point.out_of_memory] == [4096, 8192]
    assert all(point.tokens_per_s is None for point in naive if point.out_of_memory)
    assert longest_that_fits(naive) == 2048
    table = wall_table(family)
    assert table is not None
    assert table.rows[0][:2] == ("naive", "2,048")
    assert table.rows[0][3] == "4,096"
    assert table.rows[1][1:] == ("8,192", "2.61 GiB", "-", "-")
    assert "naive fits up to 2,048 tokens and runs out of memory at 4,096." in findings(family)


def test_a_run_that_was_killed_before_its_first_step_fits_nothing(tmp_path: Path) -> None:
    write_wall(tmp_path)
    killed = tmp_path / "flash-8192"
    (killed / "summary.json").unlink()
    (killed / "metrics.jsonl").write_text("")
    family = only_family(tmp_path)
    assert longest_that_fits(points(family)["flash"]) == 4096
    table = wall_table(family)
    assert table is not None
    assert table.rows[1][:2] == ("flash", "4,096")
    assert not any("fits with" in sentence for sentence in findings(family))


def test_on_a_cpu_the_wall_says_what_stands_for_a_gpu_and_whose_memory_is_shown(tmp_path: Path) -> None:
    for seq_len in (512, 1024):
        oom = {"status": "out_of_memory", "stop": 0, "peak_gib": None} if seq_len == 1024 else {"peak_gib": 0.2}
        limit = {"training.cpu_memory_gib": 2.0}
        attention = {"memory_source": None if seq_len == 1024 else "attention"}
        write_run(tmp_path / str(seq_len), steps=10, seq_len=seq_len, overrides=limit, summary=attention, **oom)
    family = only_family(tmp_path)
    assert findings(family) == [
        "naive fits up to 512 tokens and runs out of memory at 1,024.",
        "training.cpu_memory_gib stands for a GPU's size here: the whole run has to fit in 2 GiB, while the memory "
        "shown is that of one attention layer alone.",
    ]
    table = wall_table(family)
    assert table is not None
    assert table.columns[2] == "peak memory there (one layer)"
    write_wall(tmp_path / "gpu")
    table = wall_table(only_family(tmp_path / "gpu"))
    assert table is not None
    assert table.columns[2] == "peak memory there"


def test_the_longest_length_fits_with_those_that_trained_there(tmp_path: Path) -> None:
    """tiled took some steps at 8,192 tokens before it was killed, sdpa none."""
    write_wall(tmp_path)
    for attention, stop in (("tiled", 4), ("sdpa", 0)):
        for seq_len in (4096, 8192):
            folder = tmp_path / f"{attention}-{seq_len}"
            done = stop if seq_len == 8192 else None
            write_run(folder, attention, steps=10, log_every=1, seq_len=seq_len, batch_size=2, stop=done, probe_every=0)
        (folder / "summary.json").unlink()
    said = findings(only_family(tmp_path))
    assert "The longest that was tried, 8,192 tokens, fits with tiled and flash." in said


def test_the_crossover_is_where_step_times_are_equal(tmp_path: Path) -> None:
    """naive at 1e8 / T tokens a second falls behind flash's 1e5 at T = 1,000."""
    write_wall(tmp_path)
    family = only_family(tmp_path)
    (crossing,) = crossovers(family)
    assert crossing.label == "flash"
    assert crossing.seq_len == pytest.approx(1000)
    assert crossing.longest == 2048  # naive has no time beyond
    assert crossing.speedup == pytest.approx(2.048)
    table = crossover_table(family, "naive")
    assert table is not None
    assert table.rows == (("flash", "about 1,000", "2.05 times at 2,048"),)


def test_one_that_never_or_always_is_faster_has_no_crossover(tmp_path: Path) -> None:
    for seq_len in (256, 512):
        for attention, speed in (("naive", 1e4), ("tiled", 5e3), ("flash", 2e4)):
            write_run(tmp_path / f"{attention}{seq_len}", attention, steps=10, seq_len=seq_len, tokens_per_s=speed)
    table = crossover_table(only_family(tmp_path), "naive")
    assert table is not None
    assert [row[1] for row in table.rows] == ["not up to 512", "at 256 or below"]


def write_speeds(folder: Path, speeds: dict[int, float]) -> None:
    """naive at 10,000 tokens a second at every length, and flash at so many times as much."""
    for seq_len, times in speeds.items():
        for attention, factor in (("naive", 1.0), ("flash", times)):
            run = folder / f"{attention}{seq_len}"
            write_run(run, attention, steps=10, seq_len=seq_len, probe_every=0, tokens_per_s=1e4 * factor)


def test_who_falls_behind_again_has_not_overtaken(tmp_path: Path) -> None:
    write_speeds(tmp_path, {256: 1.2, 512: 0.45})
    family = only_family(tmp_path)
    assert findings(family) == ["flash keeps up with naive at 256 tokens at most and is 0.45 times as fast at 512."]
    table = crossover_table(family, "naive")
    assert table is not None
    assert table.rows == (("flash", "not beyond 256", "0.45 times at 512"),)


def test_of_several_crossovers_the_one_that_lasts_counts(tmp_path: Path) -> None:
    """Faster, slower, faster: half as fast at 512 and twice as fast at 1,024, so equal at their geometric mean."""
    write_speeds(tmp_path, {256: 1.5, 512: 0.5, 1024: 2.0, 2048: 3.0})
    family = only_family(tmp_path)
    (crossing,) = crossovers(family)
    assert (crossing.first, crossing.last) == (1024, None)
    assert crossing.seq_len == pytest.approx(1024 / 2**0.5)
    assert findings(family) == ["flash overtakes naive at about 724 tokens and is 3 times as fast at 2,048."]


def test_contexts_are_compared_at_equal_tokens_only(tmp_path: Path) -> None:
    for seq_len in (256, 512, 1024):
        write_run(tmp_path / str(seq_len), "flash", steps=50, seq_len=seq_len, batch_size=4096 // seq_len)
    family = only_family(tmp_path)
    assert same_tokens(family)
    table = context_table(family)
    assert table is not None
    assert [row[1] for row in table.rows] == ["256", "512", "1,024"]
    for seq_len in (256, 512):
        write_run(tmp_path / "unequal" / str(seq_len), "flash", steps=50, seq_len=seq_len)
    assert context_table(only_family(tmp_path / "unequal")) is None


def test_tile_sizes_stand_side_by_side(tmp_path: Path) -> None:
    for block in (128, 16, 64):
        tiles = {"attention.block_q": block, "attention.block_k": block}
        write_run(tmp_path / str(block), "tiled", steps=50, overrides=tiles, tokens_per_s=100.0 * block)
    table = block_table(only_family(tmp_path), [])
    assert table is not None
    assert [row[0] for row in table.rows] == ["tiled 16x16", "tiled 64x64", "tiled 128x128"]
    assert [row[5] for row in table.rows] == ["1,600", "6,400", "12,800"]


def test_how_far_tile_sizes_are_apart_stands_beside_what_rounding_explains(tmp_path: Path) -> None:
    """3 + 1 millionths at the first step that is logged, a hundredth at the last."""
    for block, first, last in ((16, 0.0, 0.0), (32, 3e-6, 0.005), (64, -1e-6, -0.005)):
        tiles = {"attention.block_q": block, "attention.block_k": block}
        folder = write_run(tmp_path / str(block), "tiled", steps=50, precision="fp32", probe_every=0, overrides=tiles)
        log(folder, {"step": 10, "train/loss": 2.5 + first}, {"step": 50, "train/loss": 2 + last})
    apart = "The training losses of the tile sizes differ by at most 4·10⁻⁶ at step 10"
    assert findings(only_family(tmp_path)) == [f"{apart}, and by 0.01 at step 50."]
    log(tmp_path / "16", {"step": 10, "parity/noise_loss_diff": 2e-6})
    said = f"{apart}, where naive's own rounding moves a loss by 2·10⁻⁶, and by 0.01 at step 50"
    assert findings(only_family(tmp_path)) == [f"{said}, to which training has amplified it."]
    log(tmp_path / "64", {"step": 10, "train/loss": 2.6})  # no rounding explains where that began
    assert findings(only_family(tmp_path))[0].endswith("and by 0.01 at step 50.")


def log(folder: Path, *lines: dict[str, float]) -> None:
    """Write further lines of metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def test_an_ablation_says_where_it_breaks_and_what_training_makes_of_it(tmp_path: Path) -> None:
    entry = {"dtype": "fp16", "first_bad_tile": [0, 1], "first_bad_row": 3, "max_error": 0.25, "non_finite": False}
    write_run(tmp_path / "naive", "naive", precision="fp16")
    write_run(
        tmp_path / "finite",
        "tiled",
        precision="fp16",
        error="no_rescaling",
        overrides={"attention.ablate": "no_rescaling"},
        summary={"ablation": [{"ablate": "no_rescaling"} | entry]},
    )
    write_run(
        tmp_path / "overflow",
        "tiled",
        precision="fp16",
        status="failed",
        stop=30,
        message="the loss is not finite",
        overrides={"attention.ablate": "no_max_subtraction"},
        summary={"ablation": [{"ablate": "no_max_subtraction"} | entry | {"max_error": None, "non_finite": True}]},
    )
    runs = find_runs([tmp_path]).runs
    final = {run.name: run.series("val/loss").values[-1] for run in runs}
    table = ablation_table(runs, "naive")
    assert table is not None
    assert table.rows[0][:6] == ("no_rescaling", "fp16", "(0, 1)", "3", "finite", "0.25")
    assert table.rows[0][6] == f"{final['finite']:.4f}, {final['finite'] - final['naive']:+.4f} from naive's"
    assert table.rows[1][4:] == ("inf or NaN", "-", "not finite at step 31")


def write_ablated(folder: Path, ablate: str, precision: str, **options: Any) -> None:
    """As experiment=break_it leaves a run: measured in fp16 and fp32, trained in one precision."""
    entry = {"first_bad_tile": [0, 1], "first_bad_row": 0, "max_error": 3.2, "non_finite": False, "ablate": ablate}
    entries = [] if ablate == "none" else [entry | {"dtype": dtype} for dtype in ("fp16", "fp32")]
    write_run(
        folder,
        "tiled",
        precision=precision,
        overrides={"attention.ablate": ablate},
        summary={"ablation": entries},
        **options,
    )


def test_without_the_reference_an_ablation_is_compared_with_the_intact_algorithm(tmp_path: Path) -> None:
    write_ablated(tmp_path / "0", "none", "fp32")
    write_ablated(tmp_path / "1", "no_rescaling", "fp32", error="no_rescaling")
    runs = find_runs([tmp_path]).runs
    intact, ablated = (run.series("val/loss").values[-1] for run in runs)
    table = ablation_table(runs, "naive")
    assert table is not None
    effects = [(row[1], row[6]) for row in table.rows]
    assert effects == [
        ("fp16", "-"),  # it was not trained in fp16
        ("fp32", f"{ablated:.4f}, {ablated - intact:+.4f} from the intact tiled's"),
    ]


def test_training_in_a_precision_that_was_not_measured_has_a_row_of_its_own(tmp_path: Path) -> None:
    write_ablated(tmp_path / "1", "no_max_subtraction", "bf16", status="failed", stop=30, message="not finite")
    table = ablation_table(find_runs([tmp_path]).runs, "naive")
    assert table is not None
    assert [row[6] for row in table.rows] == ["-", "-", "not finite at step 31"]
    assert table.rows[2][:6] == ("no_max_subtraction", "bf16", "-", "-", "-", "-")


def test_the_table_of_runs_shows_only_settings_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "1", "naive", overrides={"model.n_layers": 6, "tracking.group": "a"})
    write_run(tmp_path / "2", "flash", overrides={"model.n_layers": 8, "tracking.group": "b"}, status="failed", stop=40)
    table = run_table(find_runs([tmp_path]).runs)
    assert table.columns[:5] == ("run", "implementation", "seed", "model.n_layers", "status")
    assert [row[3] for row in table.rows] == ["6", "8"]
    assert table.rows[1][4] == "failed at step 40"


def test_a_setting_that_a_killed_run_left_unresolved_is_a_dash(tmp_path: Path) -> None:
    write_run(tmp_path / "1", overrides={"training.batch_size": 16})
    batch_size = "${divide:${training.batch_tokens},${seq_len}}"
    folder = write_run(tmp_path / "2", overrides={"training.batch_size": batch_size})
    (folder / "summary.json").unlink()
    assert [row[3] for row in run_table(find_runs([tmp_path]).runs).rows] == ["16", "-"]
