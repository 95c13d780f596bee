"""The mistakes in the command line of an arena, reported before anything is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from recipe.compare.arena.config import ArenaConfig, arena_mistakes, arm_mistakes
from recipe.compare.ladder.config import LadderConfig, ladder_mistakes, rule, ruled
from recipe.compare.queue.arena import PLANNED, arms_of, common_overrides
from recipe.files import flatten
from recipe.run.compose import Composition, compose_right, parsed, to_config, unswept
from recipe.run.config import Config, as_plain

SWEEPER, LADDER = ".ArenaSweeper", ".LadderSweeper"
UNREAD = ("margin", "looks", "lr", "lr_seeds", "match")  # by a ladder


def is_arena(cfg: DictConfig) -> bool:
    """Whether a composed configuration's sweep is an arena."""
    return str(cfg.hydra.sweeper._target_).endswith(SWEEPER)


def is_ladder(cfg: DictConfig) -> bool:
    """Whether it is a ladder."""
    return str(cfg.hydra.sweeper._target_).endswith(LADDER)


def has_arms(cfg: DictConfig) -> bool:
    """Whether it is an arena or a ladder."""
    return is_arena(cfg) or is_ladder(cfg)


def stray_options(config: Config, cfg: DictConfig) -> list[str]:
    """A sentence where options under `arena.*` or `ladder.*` are set and nothing would read them."""
    sentences = []
    if config.arena != ArenaConfig() and not has_arms(cfg):
        sentences.append("arena.* has no effect on a single run or another sweep; add experiment=arena.")
    if config.ladder != LadderConfig() and not is_ladder(cfg):
        sentences.append("ladder.* has no effect on a single run or another sweep; add experiment=ladder.")
    if is_ladder(cfg):
        unread = [name for name in UNREAD if getattr(config.arena, name) != getattr(ArenaConfig(), name)]
        sentences += [f"arena.{name} has no effect on a ladder; leave it out." for name in unread]
    return sentences


def arena_sweep_mistakes(composition: Composition, mistakes_of: Callable[[Composition], list[str]]) -> list[str]:
    """A sentence for each mistake in an arena or a ladder: in its options, its arms, and the configuration of each arm.

    composition  of the command line
    mistakes_of  the mistakes in a run's configuration
    """
    assert composition.cfg is not None
    config, ladder = to_config(composition.cfg), is_ladder(composition.cfg)
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
    sentences += arena_mistakes(arena, list(arms), fewest=1 if ladder else 2)
    if ladder:
        sentences += ladder_mistakes(config.ladder)
        sentences += ruled([*common_overrides(composition.right), *(line for lines in arms.values() for line in lines)])
        sentences += stray_options(config, composition.cfg)
    if sentences:
        return sentences
    common = common_overrides(composition.right)
    composed = {name: compose_right([*common, *overrides]) for name, overrides in arms.items()}
    if ladder:
        for name, arm in composed.items():
            largest = rule_of(config.ladder, config.ladder.next, arm)
            composed[name] = compose_right([*common, *arms[name], *largest])
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


def _settings(arm: Composition) -> dict[str, Any]:
    assert arm.cfg is not None
    return flatten(as_plain(to_config(arm.cfg)))


def rule_of(ladder: LadderConfig, depth: int, arm: Composition) -> list[str]:
    """The overrides of an arm at a depth; none where it does not compose."""
    if arm.cfg is None:
        return []
    cfg = arm.cfg
    return rule(ladder, depth, cfg.training.batch_size, cfg.seq_len, float(cfg.optimizer.lr), cfg.model.n_embd)
