"""The benchmark of generation, on a small model."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from bench.generate import __main__ as generate


def test_rows_of_other_candidates_stay_in_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "SHAPE", replace(generate.SHAPE, n_layers=1, n_heads=2, n_embd=16))
    monkeypatch.setattr(generate, "VOCABULARY", 500)
    arguments = ["--device", "cpu", "--rounds", "2", "--only", "this project", "--results", str(tmp_path)]
    assert generate.main(arguments) == 0
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    content["rows"].append(content["rows"][0] | {"by": "another"})
    path.write_text(json.dumps(content))
    assert generate.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert sorted(row["by"] for row in rows) == ["another", "this project"]
    for row in rows:
        assert (row["case"], row["tokens"], row["runs"]) == ("one", 60, 2)
        assert row["fastest_s"] <= row["seconds"] <= row["slowest_s"]


def test_prompts_are_the_same_every_time():
    first, second = (generate.random_prompts([3, 5]) for _ in range(2))
    assert first == second
    assert [len(prompt) for prompt in first] == [3, 5]
    assert torch.tensor(first[1]).max() < generate.VOCABULARY
