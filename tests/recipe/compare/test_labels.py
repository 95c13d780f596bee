"""Every label of a report is true of the runs it stands for: random sweeps, whose labels are checked one by one."""

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from recipe.compare.page import subtitle, write_report
from recipe.compare.runs import Run, RunSet, find_runs
from recipe.compare.sweeps import places, sweeps_of
from tests.recipe.compare.reading import only_sweep, runs_in
from tests.recipe.compare.synthetic import write_run

OPTIONS: dict[str, list[Any]] = {
    "optimizer.lr": [1e-3, 3e-3, 1e-2],
    "optimizer.name": ["adamw", "muon"],
    "score.name": ["causal", "window", "documents"],
    "score.window": [None, 16, 64],
    "model.n_embd": [32, 64, 128],
    "model.name": ["tiny", "gpt2"],
    "attention.dropout": [0.0, 0.1],
    "data.path": [None, "notes.txt"],
    "training.ema": [0.0, 0.999],
}


def write_sweeps(folder: Path, seed: int) -> RunSet:
    """One to three folders with a random choice of some options, and seeds.

    What was typed contradicts what was run wherever an override was repeated or replaced by a resumed run.
    """
    draw = random.Random(seed)
    for part in range(draw.randint(1, 3)):
        swept = draw.sample(sorted(OPTIONS), draw.randint(1, 3))
        fixed = {name: draw.choice(OPTIONS[name]) for name in draw.sample(sorted(OPTIONS), draw.randint(0, 5))}
        arms = {json.dumps({name: draw.choice(OPTIONS[name]) for name in swept}) for _ in range(draw.randint(1, 5))}
        for n, arm in enumerate(sorted(arms)):
            for seq_len in draw.choice([[256], [256], [128, 256, 512]]):
                overrides = {**fixed, **json.loads(arm)}
                typed = [f"{name}={draw.choice(OPTIONS[name])}" for name in overrides]
                write_run(
                    folder / f"{part}" / f"{n}-{seq_len}", draw.choice(["naive", "flash"]), draw.choice([1, 2]),
                    steps=20, seq_len=seq_len, overrides=overrides, probe_every=0, summary={"overrides": typed},
                )  # fmt: skip
    return find_runs([folder])


def assert_true(text: str, runs: Iterable[Run]) -> None:
    """Each setting in a label is that of every run, by summary.json; score=window is one whose score.name is window."""
    parts = [part.partition("=") for part in re.split(r", | and \d+ more$", text)]
    for name, value in [(name, value) for name, sign, value in parts if sign]:
        for run in runs:
            special = {"device": run.device, "devices": run.devices, "training.precision": run.precision}
            found = special.get(name, run.settings.get(name, run.settings.get(f"{name}.name", "default")))
            assert value == (found if isinstance(found, str) else json.dumps(found)), (text, run.name)


@pytest.mark.parametrize("seed", range(12))
def test_every_label_of_a_random_sweep_is_true_of_its_runs(seed, tmp_path):
    sweeps = sweeps_of(write_sweeps(tmp_path, seed).runs)
    sections, cells = [sweep.runs for sweep in sweeps], [cell.runs for sweep in sweeps for cell in sweep.cells]
    for groups in (sections, cells):
        for place, runs in zip(places(groups), groups, strict=True):
            assert_true(", ".join(place), runs)
    for sweep in sweeps:
        assert len({cell.where for cell in sweep.cells}) == len({cell.short for cell in sweep.cells})
        assert len({cell.where for cell in sweep.cells}) == len(sweep.cells)
        for cell in sweep.cells:
            assert_true(", ".join(cell.where), cell.runs)


@pytest.mark.parametrize(
    "swept",
    [
        {  # a score that has a window is not called causal
            ("score=causal", "score.window=16"): {"score.name": "causal", "score.window": 16},
            ("score=window", "score.window=16"): {"score.name": "window", "score.window": 16},
        },
        {  # a file of conf/ stands for the settings of its group
            ("model=tiny", "optimizer.lr=0.003"): {"model.name": "tiny", "model.n_embd": 128, "optimizer.lr": 3e-3},
            ("model=gpt2", "optimizer.lr=0.0006"): {"model.name": "gpt2", "model.n_embd": 768, "optimizer.lr": 6e-4},
        },
        {
            ("optimizer.lr=0.0006", "training.steps=400"): {},
            ("optimizer.lr=0.003", "training.steps=400"): {"optimizer.lr": 3e-3},
            ("optimizer.lr=0.0006", "training.steps=500"): {"training.steps": 500},
        },
    ],
)
def test_a_label_says_what_distinguishes_a_setting(swept, tmp_path):
    for n, overrides in enumerate(swept.values()):
        write_run(tmp_path / str(n), overrides=overrides)
    assert [cell.where for cell in sorted(only_sweep(tmp_path).cells, key=lambda cell: cell.runs[0].name)] == list(
        swept
    )


def test_the_subtitle_names_what_was_trained(tmp_path):
    variants: dict[str, dict[str, object]] = {"0": {}, "1": {"score.window": 16}, "2": {"score.formula": "s * log(n)"}}
    for name, overrides in variants.items():
        write_run(tmp_path / name, overrides=overrides)
    assert subtitle(runs_in(tmp_path)) == (
        "n_layers 12 · n_heads 12 · n_embd 768 · seq_len 256 · score causal, causal (window=16), "
        "causal (formula=s * log(n)) · dropout 0 · bf16 · NVIDIA H200"
    )


def test_a_setting_with_dollars_is_drawn_as_it_is(tmp_path):
    for n, path in enumerate((r"$\frac$", "a_$b^", None)):
        write_run(tmp_path / str(n), steps=20, probe_every=0, overrides={"score.name": path})
    write_report(find_runs([tmp_path]), tmp_path / "report")
    assert r"name=$\\frac$" in (tmp_path / "report" / "index.html").read_text()
