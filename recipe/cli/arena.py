"""The mistakes in the command line of an arena, reported before anything is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from recipe.arena.config import ArenaConfig, arena_mistakes, arm_mistakes
from recipe.cli.compose import Composition, compose_right, parsed, to_config, unswept
from recipe.config import Config, as_plain
from recipe.files import flatten
from recipe.sweeps.arena import arms_of, common_overrides

SWEEPER = ".ArenaSweeper"


def is_arena(cfg: DictConfig) -> bool:
    """Whether a composed configuration's sweep is an arena."""
    return str(cfg.hydra.sweeper._target_).endswith(SWEEPER)


def stray_options(config: Config, cfg: DictConfig) -> list[str]:
    """A sentence where options under `arena.*` are set and nothing would read them."""
    if config.arena == ArenaConfig() or is_arena(cfg):
        return []
    return ["arena.* has no effect on a single run or another sweep; add experiment=arena."]


def arena_sweep_mistakes(found: Composition, mistakes_of: Callable[[Composition], list[str]]) -> list[str]:
    """A sentence for each mistake in an arena: in its options, its arms, and the configuration of each arm.

    found        what the command line composes
    mistakes_of  those of a run's configuration
    """
    assert found.cfg is not None
    arena = to_config(found.cfg).arena
    sentences = [
        f"{line} is more than one value, and the runs of an arena share one; give each an arm (arena.arms)."
        for line in found.right
        if line not in unswept(found.right)
    ]
    if any(override.key_or_group == "seed" for override in parsed(found.right)):
        sentences.append(
            f"an arena pairs its runs by seed; instead of seed=, set arena.seeds={arena.seeds}, which counts from "
            f"arena.first_seed={arena.first_seed}."
        )
    try:
        arms = arms_of(arena)
    except ValueError as error:
        return [*sentences, str(error)]
    sentences += arena_mistakes(arena, list(arms))
    if sentences:
        return sentences
    composed = {name: compose_right([*common_overrides(found.right), *overrides]) for name, overrides in arms.items()}
    wrong = {name: [*arm.wrong, *mistakes_of(arm)] for name, arm in composed.items()}
    for name, theirs in wrong.items():
        for sentence in theirs:
            everywhere = all(sentence in others for others in wrong.values())
            sentences.append(sentence if everywhere else f"arm {name}: {sentence}")
    if sentences:
        return sentences
    return list(arm_mistakes({name: _settings(arm) for name, arm in composed.items()}))


def _settings(arm: Composition) -> dict[str, Any]:
    assert arm.cfg is not None
    return flatten(as_plain(to_config(arm.cfg)))
