"""The plan: written before the first run, and only added to."""

import json
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from recipe.run.arms import FIRST_LR_SEED, ArenaConfig
from recipe.run.plan import FILE, Plan, PlanError, new_plan, read_plan, write_plan

ARMS = {"causal": ["score=causal"], "alibi": ["score=alibi"], "cap": ["score.soft_cap=30"]}
COMPOSED = OmegaConf.create(
    {
        "seq_len": 128,
        "optimizer": {"lr": 0.003},
        "model": {"n_layers": 4, "n_embd": 128, "n_heads": 4},
        "training": {"batch_size": 2},
    }
)


def plan(**options) -> Plan:
    settings: dict[str, Any] = {"seeds": 3, "lr": [2.0, 0.5, 1.0]} | options
    config = ArenaConfig(**settings)
    return new_plan(config, ARMS, ["experiment=arena"], ["experiment=arena"], dict.fromkeys(ARMS, COMPOSED), "abc")


def test_a_plan_reads_back_as_it_was_written(tmp_path):
    wanted = replace(plan(), chosen={"causal": 0.006, "alibi": 0.003, "cap": 0.0015}, common=["seed=${oc.env:HOME}"])
    write_plan(wanted, tmp_path)
    assert read_plan(tmp_path) == wanted
    assert read_plan(tmp_path / "elsewhere") is None
    content = json.loads((tmp_path / FILE).read_text())
    del content["sizes"]  # as an older version wrote it
    (tmp_path / FILE).write_text(json.dumps(content))
    assert read_plan(tmp_path) == wanted


def test_every_arm_tries_every_rate_on_seeds_that_no_verdict_uses():
    runs = plan().lr_runs()
    tried = {(run.arm, run.lr, run.seed) for run in runs}
    assert tried == {
        (arm, lr, seed) for arm in ARMS for lr in (0.0015, 0.003, 0.006) for seed in (FIRST_LR_SEED, FIRST_LR_SEED + 1)
    }
    assert not {run.seed for run in runs} & {run.seed for run in plan().seed_runs()}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 99}, "has format 99, and this version of the project reads format 1"),
        ({"arms": {"causal": "score=causal"}}, r"is damaged \(Value 'score=causal' "),
        ({"baseline": "other"}, r"is damaged \(looks, or arms, are missing\)"),
        ({"looks": []}, r"is damaged \(looks, or arms, are missing\)"),
        ({"sizes": {"x": dict(ARMS)}}, r"is damaged \(sizes are whole numbers\)"),
        ({"lr": {"causal": ["${oc.env:HOME}"]}}, "is damaged .* '${oc.env:HOME}' ".replace("$", r"\$")),
    ],
)
def test_a_plan_that_cannot_be_read_is_named(tmp_path, change, sentence):
    write_plan(plan(), tmp_path)
    (tmp_path / FILE).write_text(json.dumps(json.loads((tmp_path / FILE).read_text()) | change))
    with pytest.raises(PlanError, match=sentence):
        read_plan(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        read_plan(tmp_path)


def test_at_a_size_the_width_grows_with_the_layers_and_the_rate_falls_with_its_root():
    sized = plan(sizes=[1, 4], lr=[])
    runs = sized.seed_runs()
    assert [(run.size, run.arm) for run in runs[:6]] == [(size, arm) for size in (1, 4) for arm in ARMS]
    assert sized.overrides(runs[0])[-1] == [
        "model.n_layers=1",
        "model.n_embd=32",
        "model.n_heads=1",
        "training.batch_tokens=256",
    ]
    assert {run.size: run.lr for run in runs} == {1: 0.006, 4: 0.003}
