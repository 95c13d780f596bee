"""The replacements in Hydra that save the tests time change no configuration."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf, open_dict

from recipe.run.compose import as_hydra_reads, composed, to_config
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
def test_configurations_are_those_of_hydra_as_it_is(overrides):
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


@pytest.mark.parametrize("text", ["s * log(n)", "s + bias[h, min(i - j, 127)]", "max(s, 0)", "2*s"])
def test_a_formula_needs_the_shells_quotes_alone(text):
    assert to_config(composed([as_hydra_reads(f"score.formula={text}")])).score.formula == text
    assert to_config(composed([as_hydra_reads(f'score.formula="{text}"')])).score.formula == text


def test_a_change_to_one_configuration_reaches_no_other():
    first = composed(["attention=tiled"])
    plain = OmegaConf.to_yaml(first)
    with open_dict(first):
        first.more = first.attention.block_q = first.hydra.job.chdir = 7
        first.optimizer.betas.append(0.5)
    assert OmegaConf.to_yaml(composed(["attention=tiled"])) == plain
