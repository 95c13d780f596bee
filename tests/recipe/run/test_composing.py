"""The replacements in Hydra that save the tests time change no configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.run.compose import composed, to_config
from tests.composing import REPLACED, as_it_is


def replaced() -> list[bool]:
    return [owner.__dict__.get(name) is replacement for owner, name, _, replacement in REPLACED]


def metadata(config: DictConfig) -> dict[str, Any]:
    """The types and flags of a configuration; of the values that were resolved, such as the time, the names."""
    return vars(config._metadata) | {"resolver_cache": config._metadata.resolver_cache.keys()}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["attention=tiled", "score=gemma2", "model=llama", "optimizer=muon", "seed=2", "+data.more=1"],
        ["experiment=parity", "hydra.run.dir=${now:%Y}/${seed}", "training.steps=${seq_len}"],
        ["hydra/launcher=gpus", "experiment=arena", "arena.arms='a: seed=1 | b: seed=2'"],
    ],
    ids=str,
)
def test_configurations_are_those_of_hydra_as_it_is(overrides: list[str]) -> None:
    assert all(replaced())
    hastened = [composed(overrides) for _ in range(2)]
    with as_it_is():
        assert not any(replaced())
        expected = composed(overrides)
    for config in hastened:
        assert OmegaConf.to_yaml(config) == OmegaConf.to_yaml(expected)
        assert metadata(config) == metadata(expected)
        if "+data.more=1" not in overrides:  # which no dataclass has
            assert to_config(config) == to_config(expected)


def test_a_change_to_one_configuration_reaches_no_other() -> None:
    first = composed(["attention=tiled"])
    plain = OmegaConf.to_yaml(first)
    with open_dict(first):
        first.more = first.attention.block_q = first.hydra.job.chdir = 7
        first.optimizer.betas.append(0.5)
    assert OmegaConf.to_yaml(composed(["attention=tiled"])) == plain


def test_a_file_that_has_changed_and_files_of_another_folder_are_read(tmp_path: Path) -> None:
    for folder, key in (("first", "a"), ("second", "b")):
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(f"defaults: [part: one, _self_]\n{key}: 1\n")
        (tmp_path / folder / "part" / "one.yaml").write_text("x: 1\n")

    def read(folder: str) -> Any:
        with initialize_config_dir(str(tmp_path / folder), version_base="1.3"):
            return compose("config", [])

    assert read("first") == {"part": {"x": 1}, "a": 1}
    assert read("second") == {"part": {"x": 1}, "b": 1}
    changed = tmp_path / "first" / "part" / "one.yaml"
    changed.write_text("x: 2\n")
    os.utime(changed, ns=(0, changed.stat().st_mtime_ns + 1))
    assert read("first") == {"part": {"x": 2}, "a": 1}
