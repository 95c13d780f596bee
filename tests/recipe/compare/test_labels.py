"""Every label of a report is true of the runs it stands for: random sweeps, whose labels are checked one by one."""

from __future__ import annotations

import csv
import json
import random
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe.compare.labels import heading
from recipe.compare.page import Report, write_report
from recipe.compare.runs import Run, RunSet, find_runs
from recipe.compare.sweeps import sweeps_of
from recipe.compare.text import answer
from tests.recipe.compare.synthetic import write_run

CONF = Path(__file__).parents[3] / "conf"
OPTIONS: dict[str, list[Any]] = {
    "optimizer.lr": [1e-3, 3e-3, 1e-2],
    "optimizer.name": ["adamw", "muon"],
    "score.name": ["causal", "window", "soft_cap", "documents"],
    "score.window": [None, 16, 64],
    "score.soft_cap": [None, 50.0],
    "model.n_embd": [32, 64, 128],
    "model.n_layers": [2, 4],
    "model.name": ["tiny", "gpt2"],
    "model.dropout": [0.0, 0.1],
    "attention.dropout": [0.0, 0.1],
    "data.documents": ["ignore", "mask"],
    "data.path": [None, "notes.txt"],
    "training.ema": [0.0, 0.999],
    "schedule.warmup_steps": ["auto", 10],
}


def write_sweeps(folder: Path, seed: int) -> RunSet:
    """One to three folders with a product or a random choice of some options, and seeds.

    What was typed contradicts what was run wherever an override was repeated or replaced by a resumed run.
    """
    draw = random.Random(seed)
    for part in range(draw.randint(1, 3)):
        swept = draw.sample(sorted(OPTIONS), draw.randint(1, 3))
        fixed = {name: draw.choice(OPTIONS[name]) for name in draw.sample(sorted(OPTIONS), draw.randint(0, 6))}
        arms = {json.dumps({name: draw.choice(OPTIONS[name]) for name in swept}) for _ in range(draw.randint(1, 5))}
        lengths = draw.choice([[256], [256], [128, 256, 512]])
        numbers = draw.choice([[1], [1, 2]])
        for n, arm in enumerate(sorted(arms)):
            for seq_len in lengths:
                for number in numbers:
                    overrides = {"score.layers": None, "score.sinks": False, **fixed, **json.loads(arm)}
                    typed = [f"{name}={draw.choice(OPTIONS.get(name, [0]))}" for name in overrides]
                    write_run(
                        folder / f"{part}" / f"{n}-{seq_len}-{number}", draw.choice(["naive", "flash"]), number,
                        steps=20, seq_len=seq_len, overrides=overrides, probe_every=0, log_every=5,
                        summary={"overrides": typed, "val_loss": draw.uniform(3, 4)},
                    )  # fmt: skip
    return find_runs([folder])


def claims(text: str) -> list[tuple[str, str]]:
    """The settings that a label names."""
    parts = re.split(r", | and \d+ more settings?$", text)
    return [(name, value) for name, sign, value in (part.partition("=") for part in parts) if sign]


def recorded(run: Run, name: str) -> str:
    """A setting as an override, from summary.json."""
    special = {"device": run.device, "devices": run.devices, "training.precision": run.precision}
    value = special.get(name, run.settings.get(name, "default"))
    return value if isinstance(value, str) else json.dumps(value)


def assert_true(text: str, runs: Iterable[Run]) -> None:
    """Each setting in a label is that of every run; the name of a file in conf/ implies all settings that it makes."""
    named = claims(text)
    for run in runs:
        for name, value in named:
            if "." not in name and (CONF / name).is_dir():
                assert run.option(f"{name}.name") == value
                content = yaml.safe_load((CONF / name / f"{value}.yaml").read_text())
                made = content.get(name) if isinstance(content.get(name), dict) else content
                off = dict.fromkeys(("window", "soft_cap", "sinks", "alibi", "layers")) if name == "score" else {}
                for option, wanted in (off | made).items():
                    now = run.option(f"{name}.{option}")
                    told = f"{name}.{option}" in dict(named) or re.search(r" and \d+ more settings?$", text)
                    if name in ("score", "model") and f"{name}.{option}" in run.settings:
                        assert told or (now or None) == (wanted or None), (text, run.name, option)
            else:
                assert recorded(run, name) == value, (text, run.name)


def assert_sizes(subtitle: str, runs: list[Run]) -> None:
    for key, unit in (("layers", "layer"), ("heads", "head"), ("embd", "channel")):
        found = re.search(rf"(\d+)(?: to (\d+))? {unit}", subtitle)
        assert found
        sizes = [run.option(f"model.n_{key}") for run in runs]
        assert (min(sizes), max(sizes)) == (int(found[1]), int(found[2] or found[1]))


@pytest.mark.parametrize("seed", range(40))
def test_every_label_of_a_random_sweep_is_true_of_its_runs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipe.compare.page.charts", lambda *_: [])  # they take seconds, and their titles are labels
    found = write_sweeps(tmp_path / "runs", seed)
    report: Report = write_report(found, tmp_path / "report")
    by_name, sweeps = {run.name: run for run in found.runs}, sweeps_of(found.runs)
    for row in report.runs.rows:
        of_row = dict(zip(report.runs.columns, row, strict=True))
        assert_true(of_row.get("settings", ""), [by_name[of_row["run"]]])
        assert of_row["implementation"].split(" ")[0] == by_name[of_row["run"]].attention
    with (tmp_path / "report" / "runs.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            assert_true(line["settings"], [by_name[line["run"]]])
    assert len(report.sections) == len(sweeps)
    for section, sweep in zip(report.sections, sweeps, strict=True):
        runs = list(sweep.runs)
        names, _, rest = section.title.partition(", ") if "=" in section.title else (section.title, "", "")
        assert_true(rest, runs)
        assert len(claims(section.title)) <= 4
        assert {str(run.option("model.name")) for run in runs} <= set(re.split(", | on ", section.title.split("=")[0]))
        assert_sizes(section.subtitle, runs)
        places = [cell.where for cell in sweep.cells]
        assert len(set(places)) == len(places)
        assert len({cell.short for cell in sweep.cells}) == len(places)
        for cell in sweep.cells:
            assert_true(", ".join(cell.where), cell.runs)
    words = " ".join(report.notes)
    for names in re.findall(r"The runs differ in (.*?), so they are not all compared", words):
        for name in re.split(", | and ", names):
            if name in by_name[found.runs[0].name].settings:
                assert len({json.dumps(run.option(name)) for run in found.runs}) > 1


@pytest.mark.parametrize("seed", range(20))
def test_the_setting_that_a_headline_calls_the_lowest_has_the_lowest_mean(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    means = {}
    for lr in (1e-3, 2e-3, 3e-3):
        losses = [draw.uniform(3, 4) for _ in range(3)]
        means[lr] = statistics.fmean(losses)
        for number, loss in enumerate(losses):
            write_run(
                tmp_path / f"{lr}-{number}", seed=number, steps=10, probe_every=0, overrides={"optimizer.lr": lr},
                summary={"val_loss": loss, "overrides": ["optimizer.lr=0.001"]},
            )  # fmt: skip
    (sweep,) = sweeps_of(find_runs([tmp_path]).runs)
    headline = answer(sweep, [], "naive").headline
    lowest = min(means, key=means.__getitem__)
    assert headline == f"The lowest validation loss: optimizer.lr={lowest:g} (means of 3 seeds)"


def test_a_score_that_has_a_window_is_not_called_causal(tmp_path: Path) -> None:
    for name in ("causal", "window", "alibi"):
        score = {"score.name": name, "score.window": 16, "score.alibi": name == "alibi"}
        write_run(tmp_path / name, overrides=score, summary={"overrides": [f"score={name}", "score.window=16"]})
    (sweep,) = sweeps_of(find_runs([tmp_path]).runs)
    assert {cell.runs[0].name: cell.where for cell in sweep.cells} == {
        "causal": ("score=causal", "score.window=16"),
        "window": ("score=window", "score.window=16"),
        "alibi": ("score=alibi", "score.window=16"),
    }


def test_a_file_of_conf_stands_for_the_settings_it_makes(tmp_path: Path) -> None:
    gpt2 = yaml.safe_load((CONF / "model" / "gpt2.yaml").read_text())
    sizes = {
        "tiny": {"model.n_layers": 4, "model.n_heads": 4, "model.n_embd": 128, "optimizer.lr": 3e-3},
        "gpt2": {f"model.{key}": value for key, value in gpt2["model"].items()} | {"optimizer.lr": 6e-4},
    }
    for name, size in sizes.items():
        write_run(tmp_path / name, overrides=size | {"model.name": name, "model.bias": False})
    (sweep,) = sweeps_of(find_runs([tmp_path]).runs)
    assert [cell.where for cell in sweep.cells] == [("model=gpt2",), ("model=tiny",)]


def test_a_long_heading_ends_in_the_number_of_what_it_leaves_out() -> None:
    assert heading(("a=1", "b=2", "c=3")) == "a=1, b=2, c=3"
    assert heading(("a=1", "b=2", "c=3", "d=4")) == "a=1, b=2, c=3 and 1 more setting"
    assert heading(tuple(f"x.{n}={n}" for n in range(15))).endswith("x.2=2 and 12 more settings")


def test_a_setting_with_dollars_is_drawn_as_it_is(tmp_path: Path) -> None:
    for n, path in enumerate((r"$\frac$", "a_$b^", None)):
        write_run(tmp_path / str(n), steps=20, probe_every=0, overrides={"score.name": path})
    write_report(find_runs([tmp_path]), tmp_path / "report")
    assert r"name=$\\frac$" in (tmp_path / "report" / "index.html").read_text()
