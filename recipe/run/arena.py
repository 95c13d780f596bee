"""The mistakes in the command line of an arena, reported before anything is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from recipe.files import flatten
from recipe.run.arms import ArenaConfig, arena_mistakes, arm_mistakes, size_overrides
from recipe.run.compose import Composition, compose_right, parsed, to_config, unswept
from recipe.run.config import Config, as_plain
from recipe.run.queue.arena import PLANNED, arms_of, common_overrides


def is_arena(cfg: DictConfig) -> bool:
    """Whether a composed configuration's sweep is an arena."""
    return str(cfg.hydra.sweeper._target_).endswith(".ArenaSweeper")


def stray_options(config: Config, cfg: DictConfig) -> list[str]:
    """A sentence where options under `arena.*` are set and nothing would read them."""
    if config.arena == ArenaConfig() or is_arena(cfg):
        return []
    return ["arena.* has no effect on a single run or another sweep; add experiment=arena."]


def arena_sweep_mistakes(composition: Composition, mistakes_of: Callable[[Composition], list[str]]) -> list[str]:
    """A sentence for each mistake in an arena: in its options, its arms, and the configuration of each arm.

    composition  of the command line
    mistakes_of  the mistakes in a run's configuration
    """
    assert composition.cfg is not None
    config = to_config(composition.cfg)
    arena = config.arena
    sentences = [
        f"{line} is more than one value, and the runs of an arena share one; give each an arm (arena.arms)."
        for line in composition.right
        if line not in unswept(composition.right)
    ]
    if any(override.key_or_group == "seed" for override in parsed(composition.right)):
        sentences.append(
            f"an arena pairs its runs by seed; instead of seed=, set arena.seeds={arena.seeds}, which counts from "
            f"arena.first_seed={arena.first_seed}."
        )
    try:
        arms = arms_of(arena)
    except ValueError as error:
        return [*sentences, str(error)]
    sentences += arena_mistakes(arena, list(arms))
    if arena.sizes and config.training.batch_tokens is not None:
        sentences.append(
            f"training.batch_tokens={config.training.batch_tokens} would be replaced, as a step of an arena with sizes "
            "has training.batch_size sequences for each layer; leave it out."
        )
    if sentences:
        return sentences
    common = common_overrides(composition.right)
    composed = {name: at_largest_size([*common, *overrides], arena.sizes) for name, overrides in arms.items()}
    wrong = {name: [*arm.wrong, *mistakes_of(arm)] for name, arm in composed.items()}
    for name, mistakes in wrong.items():
        for sentence in mistakes:
            everywhere = all(sentence in others for others in wrong.values())
            sentences.append(sentence if everywhere else f"arm {name}: {sentence}")
    if not sentences:
        for name, lines in arms.items():
            planned = [line for line in lines if parsed([line])[0].key_or_group in PLANNED]
            sentences += [f"arm {name}: {line} is set by the plan of the sweep; leave it out." for line in planned]
    if sentences:
        return sentences
    return list(arm_mistakes({name: _settings(arm) for name, arm in composed.items()}))


def at_largest_size(overrides: list[str], sizes: list[int]) -> Composition:
    """What the overrides of an arm compose, at the largest of the arena's sizes where it has some."""
    arm = compose_right(overrides)
    if not sizes or arm.cfg is None:
        return arm
    return compose_right([*overrides, *size_overrides(arm.cfg, sizes[-1])])


def _settings(arm: Composition) -> dict[str, Any]:
    assert arm.cfg is not None
    return flatten(as_plain(to_config(arm.cfg)))
