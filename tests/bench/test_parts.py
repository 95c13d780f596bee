"""The arms whose prices are measured are those of the speedrun, and others; all of them can be trained."""

from __future__ import annotations

import json

from bench.parts import OTHERS, SIZE, arms
from bench.tables.blocks import results_path
from recipe.run.compose import composed, to_config
from recipe.run.config import as_plain

FINEWEB = [
    "experiment=speedrun", "data=fineweb_edu", "data.tokenizer=gpt2", "model=gpt2", "attention=flash", "seq_len=1024",
    "training.batch_size=32", "training.steps=3000", "training.compile=true",
]  # fmt: skip


def configured(*overrides: str) -> str:
    return json.dumps(as_plain(to_config(composed(list(overrides)))), default=str)


def test_every_arm_composes_to_a_configuration_of_its_own() -> None:
    found = {name: configured(*SIZE, *overrides) for name, overrides in arms().items()}
    assert len(set(found.values())) == len(found)


def test_every_arm_of_the_speedrun_composes_with_fineweb() -> None:
    for name, overrides in arms().items():
        if name not in OTHERS:
            config = to_config(composed([*FINEWEB, *overrides]))
            assert (config.data.name, config.data.hub_subset, config.seq_len) == ("fineweb_edu", "sample-10BT", 1024)
            assert (config.model.n_layers, config.model.n_embd, config.optimizer.lr) == (12, 768, 6e-4)
            tokens = config.data.max_tokens
            assert tokens is not None
            assert config.training.steps * 32 * 1024 < tokens  # less than an epoch


def test_each_price_has_a_baseline_that_its_call_shares() -> None:
    rows = json.loads(results_path("parts").read_text())["rows"]
    assert {row["arm"] for row in rows} <= arms().keys()
    assert all(row["overrides"] == arms()[row["arm"]] and row["baseline_ms"] > 0 for row in rows)
    assert len({(row["measurement"], row["baseline_ms"]) for row in rows}) == len({row["measurement"] for row in rows})
