"""Run folders in every state that a run, a full disk or an impatient user can leave them in."""

import math
from pathlib import Path

import pytest

from recipe.compare.headline import notes_on
from recipe.compare.page import write_report
from recipe.compare.runs import find_runs, read_run
from recipe.compare.sweeps import labels_of, sweeps_of
from tests.recipe.compare.reading import cells_in, runs_in
from tests.recipe.compare.synthetic import write_run


def notes(folder: Path) -> list[str]:
    found = find_runs([folder])
    return notes_on(found, sweeps_of(found.runs))


def test_a_run_is_read_from_its_files(tmp_path):
    run = read_run(write_run(tmp_path / "run", "flash", 7, steps=100, seq_len=512, peak_gib=11.5))
    assert (run.attention, run.seed, run.seq_len, run.status, run.step) == ("flash", 7, 512, "completed", 100)
    assert (run.device, run.precision, run.commit) == ("NVIDIA H200", "bf16", "0123456")
    assert list(run.series("train/loss").steps) == list(range(10, 101, 10))
    assert list(run.series("val/loss").steps) == [0, 50, 100]
    assert run.final("val/loss") == run.series("val/loss").values[-1]
    assert run.peak() == 11.5
    assert run.notes == ()


def test_damaged_lines_are_left_out_and_noted(tmp_path):
    path = write_run(tmp_path / "run", steps=100) / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[:-1])  # the line break alone is missing: nothing is lost
    assert read_run(path.parent).series("train/loss").steps[-1] == 100
    assert read_run(path.parent).notes == ()
    for end in (3, 30, len(content.splitlines()[-1])):
        path.write_bytes(content[:-end])
        assert read_run(path.parent).series("train/loss").steps[-1] == 90
    lines = content.splitlines()
    lines[3], lines[5] = b"\xff\x00\xfe", b'["step", 5]'
    path.write_bytes(b"\n".join(lines) + b"\n\n")
    run = read_run(path.parent)
    assert run.notes == ("2 of the lines of metrics.jsonl cannot be read, the first is line 4.",)
    assert 30 not in run.series("train/loss").steps


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_a_readable_summary_is_read_from_its_lines_and_config(damaged, tmp_path):
    folder = write_run(tmp_path / "run", "flash", 3, steps=200, stop=120, tokens_per_s=1000.0)
    (folder / "summary.json").unlink()
    if damaged:
        (folder / "summary.json").write_text('{"status": "comp')
    run = read_run(folder)
    assert (run.status, run.step, run.attention, run.seed) == ("unfinished", 120, "flash", 3)
    assert run.median("throughput/tokens_per_s") == pytest.approx(1000, rel=0.02)
    assert run.final("train/loss") == run.series("train/loss").values[-1]
    assert [note.startswith("summary.json cannot be read (it is not ") for note in run.notes] == [True] * damaged


def test_steps_logged_again_count_once_and_losses_that_are_not_finite_are_read_as_such(tmp_path):
    path = write_run(tmp_path / "run", steps=100) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 50, "train/loss": 1.25}\n{"step": 110, "train/loss": "nan"}\n')
        file.write('{"step": 120, "train/loss": "-inf"}\n')
    series = read_run(path.parent).series("train/loss")
    assert list(series.steps) == list(range(10, 121, 10))
    assert (series.values[4], series.values[-1]) == (1.25, -math.inf)
    assert math.isnan(series.values[-2])
    assert read_run(path.parent).diverged() == 110


def test_why_runs_failed_is_noted(tmp_path):
    """A run whose name is a number is called "run 2". An ablated run that came to NaN gets no advice."""
    write_run(tmp_path / "2", status="failed", stop=20, message="disk full.")
    write_run(tmp_path / "b", status="out_of_memory", stop=0, message="CUDA out of memory")
    write_run(tmp_path / "c", status="interrupted", stop=50)
    ablated = {"attention.ablate": "no_max_subtraction"}
    write_run(tmp_path / "d", "tiled", status="failed", stop=25, message="Lower optimizer.lr.", overrides=ablated)
    assert notes(tmp_path) == ["run 2 failed: disk full."]


def test_a_job_that_ended_before_its_record_began_failed_for_what_it_printed_last(tmp_path):
    for n, printed in enumerate(("error: data.path=x is not there.\n\n", "attention=naive\n")):
        (tmp_path / str(n) / ".hydra").mkdir(parents=True)
        (tmp_path / str(n) / ".hydra" / "overrides.yaml").write_text("- seed=1\n")
        (tmp_path / str(n) / "console.log").write_text(printed)
    failed, unfinished = runs_in(tmp_path)
    assert (failed.status, failed.summary["message"]) == ("failed", "data.path=x is not there.")
    assert unfinished.status == "unfinished"


def test_a_probe_that_compared_less_than_a_micro_batch_is_noted(tmp_path):
    """Older versions wrote it as text, which is ignored."""
    for n, tokens in enumerate(([12, 256], "1x128", [1, 128])):
        write_run(tmp_path / str(n), "flash", n, steps=20, summary={"parity": {"tokens": tokens}})
    assert notes(tmp_path) == ["run 2: the probe compared 1 x 128 of 12 x 256 tokens."]


def test_parts_of_a_summary_that_are_no_parts_are_passed_over(tmp_path):
    parts = ("median", "peak", "git", "versions", "device", "ablation", "step", "parameters")
    for seq_len, damaged in ((128, [1]), (256, "text")):
        folder = tmp_path / "sweep" / str(seq_len)
        write_run(folder, steps=100, seq_len=seq_len, tokens_per_s=1000.0, summary=dict.fromkeys(parts, damaged))
    found = find_runs([tmp_path / "sweep"])
    run = found.runs[0]
    assert run.median("throughput/tokens_per_s") == pytest.approx(1000, rel=0.02)  # of its lines
    assert (run.peak(), run.commit, run.device) == (None, "", "unknown device")
    write_report(found, tmp_path / "report")


def test_runs_are_found_at_any_depth_and_in_natural_order(tmp_path):
    for n in (10, 2, 1):
        write_run(tmp_path / "sweep" / str(n))
    (tmp_path / "sweep" / "1" / "checkpoints" / "step-00000500").mkdir(parents=True)
    assert [run.name for run in find_runs([tmp_path / "sweep"]).runs] == ["1", "2", "10"]
    assert len(runs_in(tmp_path)) == 3
    assert [run.name for run in runs_in(tmp_path / "sweep" / "2")] == ["2"]


def test_a_folder_given_twice_counts_once_and_one_without_runs_is_noted(tmp_path):
    (tmp_path / "empty").mkdir()
    found = find_runs([write_run(tmp_path / "run"), tmp_path / "run", tmp_path / "empty"])
    assert (len(found.runs), found.notes) == (1, (f"{tmp_path / 'empty'} holds no run and was left out.",))


def test_dirty_trees_mixed_commits_and_devices_are_named(tmp_path):
    write_run(tmp_path / "a", summary={"git": {"commit": "a" * 40, "dirty": True, "changes": "12345678"}})
    write_run(
        tmp_path / "b", summary={"git": {"commit": "b" * 40, "dirty": False, "changes": "9abcdef0"}}, device="cpu"
    )
    assert notes(tmp_path) == [
        "The runs differ in device, so they are not all compared with each other.",
        "Runs from a tree with uncommitted changes: a.",
        "The runs come from different commits: aaaaaaa, bbbbbbb.",
        "The runs come from different uncommitted changes: 12345678, 9abcdef0.",
        "The runs come from different devices: NVIDIA H200, cpu.",
    ]


def test_labels_distinguish_variants_of_an_implementation(tmp_path):
    variants: dict[str, dict[str, object]] = {
        "naive": {},
        "tiled 16x16": {"attention.block_q": 16, "attention.block_k": 16},
        "tiled 64x64 no_rescaling": {"attention.ablate": "no_rescaling"},
        "flash path=plain": {"attention.path": "plain"},
        "flash path=hopper": {"attention.path": "hopper"},
    }
    for n, (label, overrides) in enumerate(variants.items()):
        write_run(tmp_path / str(n), label.split()[0], overrides=overrides)
    assert list(labels_of(runs_in(tmp_path)).values()) == list(variants)


def test_only_implementation_seed_and_bookkeeping_may_differ_within_a_cell(tmp_path):
    alike = {"seed": 2, "attention.block_q": 16, "training.eval_every": 5, "parity.every": 7, "tracking.mode": "x"}
    apart = {"model.n_layers": 6, "data.documents": "mask", "score.window": 128, "attention.dropout": 0.1}
    for n, (name, value) in enumerate(({"device": "auto"} | alike).items()):
        write_run(tmp_path / f"alike-{n}", overrides={name: value})
    assert len(cells_in(tmp_path)) == 1
    for n, (name, value) in enumerate(apart.items()):
        write_run(tmp_path / f"apart-{n}", overrides={name: value})
    for n, differing in enumerate(({"device": "cpu"}, {"devices": 2}, {"precision": "fp32"})):
        write_run(tmp_path / f"on-{n}", **differing)  # type: ignore[arg-type]
    assert len(cells_in(tmp_path)) == 4 + len(apart)


def test_a_killed_run_joins_those_it_shares_its_settings_with(tmp_path):
    write_run(tmp_path / "a", "naive")
    (write_run(tmp_path / "b", "flash") / "summary.json").unlink()
    (cell,) = cells_in(tmp_path)
    assert cell.labels() == ["naive", "flash"]
    write_run(tmp_path / "c", "naive", device="cpu")  # now the killed run's device is ambiguous
    assert len(cells_in(tmp_path)) == 3


def test_of_several_runs_of_a_seed_the_one_with_most_steps_counts(tmp_path):
    for n, stop in enumerate((390, 400, 10)):
        write_run(tmp_path / str(n), status="completed" if stop == 400 else "interrupted", stop=stop)
    (cell,) = cells_in(tmp_path)
    assert cell.of("naive")[1].name == "1"


def test_lengths_with_equal_tokens_are_one_sweep_and_mixed_batches_are_not(tmp_path):
    sizes = [(256, 8), (512, 4), (256, 2), (512, 2)]
    for known in (2, 4):
        for seq_len, batch_size in sizes[known - 2 : known]:
            write_run(tmp_path / f"{seq_len}-{batch_size}", seq_len=seq_len, batch_size=batch_size)
        lengths, *rest = sweeps_of(runs_in(tmp_path))
        assert (lengths.over_lengths, [cell.seq_len for cell in lengths.cells]) == (True, [256, 512])
        assert [sweep.over_lengths for sweep in rest] == [False] * (known // 2 - 1)
