"""What the report derives over lengths, against laws that the made-up runs were made from."""

from __future__ import annotations

from pathlib import Path

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


def test_an_ablation_says_where_it_breaks_and_what_training_makes_of_it(tmp_path: Path) -> None:
    entry = {"dtype": "fp16", "first_bad_tile": [0, 1], "first_bad_row": 3, "max_error": 0.25, "non_finite": False}
    write_run(tmp_path / "naive", "naive")
    write_run(
        tmp_path / "finite",
        "tiled",
        error="no_rescaling",
        overrides={"attention.ablate": "no_rescaling"},
        summary={"ablation": [{"ablate": "no_rescaling"} | entry]},
    )
    write_run(
        tmp_path / "overflow",
        "tiled",
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
    assert table.rows[1][4:] == ("inf or NaN", "-", "stopped after step 30: the loss is not finite")


def test_the_table_of_runs_shows_only_settings_that_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "1", "naive", overrides={"model.n_layers": 6, "tracking.group": "a"})
    write_run(tmp_path / "2", "flash", overrides={"model.n_layers": 8, "tracking.group": "b"}, status="failed", stop=40)
    table = run_table(find_runs([tmp_path]).runs)
    assert table.columns[:5] == ("run", "implementation", "seed", "model.n_layers", "status")
    assert [row[3] for row in table.rows] == ["6", "8"]
    assert table.rows[1][4] == "failed at step 40"
