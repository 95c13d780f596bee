"""Arms with as many parameters as the baseline: arena.match=params chooses the width of each arm's MLP."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from omegaconf import DictConfig, OmegaConf

from data.tasks import TASKS
from data.tokenizers import SIZES
from model.counting import num_parameters
from recipe.run.build import build_gpt
from recipe.run.config import Config
from recipe.run.queue.jobs import SweepError


def matching_width(name: str, arm: Config, baseline: Config) -> int:
    """The MLP's width with which an arm's parameters are nearest to the baseline's. Raises SweepError where even the
    narrowest has more."""
    width = arm.model.mlp_width or 4 * arm.model.n_embd
    at_width, one_more = parameters(arm, width), parameters(arm, width + 1)
    excess = at_width - parameters(baseline, baseline.model.mlp_width)
    matching = width - round(excess / (one_more - at_width))
    if matching < 1:
        raise SweepError(
            f"arm {name} has more parameters than the baseline with any width of its MLP; use arena.match=none, or "
            "make the arm smaller."
        )
    return matching


def config_of(cfg: DictConfig) -> Config:
    """The configuration of a run, of what Hydra composed for a sweep."""
    parts = OmegaConf.masked_copy(cfg, [part.name for part in fields(Config)])
    return Config(**OmegaConf.to_object(parts))  # type: ignore[arg-type]


def parameters(config: Config, mlp_width: int | None) -> int:
    """The number of a model's parameters with an MLP of this width."""
    sized = replace(config, model=replace(config.model, mlp_width=mlp_width))
    with torch.device("meta"):
        return num_parameters(build_gpt(sized, vocab_size(config), torch.device("cpu")))


def vocab_size(config: Config) -> int:
    """The vocabulary's size: the data's, where it is known before preparation, else a learned tokenizer's."""
    task = TASKS.get(config.data.name)
    return task.vocab_size if task else SIZES.get(config.data.tokenizer, config.data.bpe_vocab_size)
