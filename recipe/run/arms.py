"""The options of an arena, its arms and sizes, and their mistakes."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from omegaconf import DictConfig

LR, SEEDS = "lr", "seeds"  # the stages: learning rates first, then the seeds on which the verdicts rest
# Seeds of the learning-rate sweep count from here, so that no arm is judged on a seed that chose its learning rate.
FIRST_LR_SEED, LR_SEEDS = 1_000_001, 2
MOST_SEEDS = 1_000_000
# Arms have to agree in these: else they would not train and be evaluated on the same tokens. What else they change is
# their own.
SHARED = (
    "seq_len", "device", "training.steps", "training.batch_size", "training.batch_tokens", "training.eval_every",
    "training.eval_batches", "training.eval_span",
)  # fmt: skip
SHARED_GROUPS = ("data",)
NAMES = ("model.name", "score.name")
OWN_DATA = ("data.documents", "data.cache")
IS_OVERRIDE = re.compile(r"[+~]{0,2}[\w./@]+=(?!=)")


@dataclass
class Rules:
    """The option `arena.rules`.

    first_seed  the first of the seeds
    margin      the largest difference in loss that does not matter, as a share of the baseline's loss
    looks       how often the verdicts may be read, each time after more seeds; together they are wrong in 5 % at most
    """

    first_seed: int = 1
    margin: float = 0.005
    looks: int = 2


@dataclass
class ArenaConfig:
    """The options under `arena.*`, which experiment=arena reads.

    arms        separated by |: each a name, a colon and overrides, or a file of conf/arm/
    seeds       seeds of each arm; more of them continue a sweep
    rules       what the plan fixes before the first run
    lr          factors of each arm's optimizer.lr that are tried first
    sizes       numbers of layers, such as [1,2,4], the width growing with them; empty: the model's
    arm         its arm, set for each run of an arena
    """

    arms: str | None = None
    seeds: int = 6
    rules: Rules = field(default_factory=Rules)
    lr: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])
    sizes: list[int] = field(default_factory=list)
    arm: str | None = None


def read_arms(text: str, files: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of each arm by its name. Raises ValueError with a sentence.

    text   "causal: score=causal | alibi": overrides are separated by blanks, and quoted as in a shell where they have
           some, but for a formula's blanks; an arm without a colon is one of `files`
    files  the names in conf/arm/
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"arena.arms={text} cannot be read: {error}.") from error
    arms, part = dict[str, list[str]](), list[str]()
    for word in [*words, "|"]:
        if word != "|":
            if part and part[-1].startswith("score.formula=") and not IS_OVERRIDE.match(word):
                part[-1] += f" {word}"
            else:
                part.append(word)
            continue
        name, colon, attached = part[0].partition(":") if part else ("", "", "")
        if not name or "=" in name:
            raise ValueError(
                f"arena.arms has an arm without a name ({' '.join(part) or 'nothing between two |'}); "
                "write <name>: <override> <override> ... | <name>: ..."
            )
        if name in arms:
            raise ValueError(f"arena.arms names {name} twice; give each arm a different name.")
        if not colon and name not in files:
            raise ValueError(
                f"arena.arms={name} has no overrides and is not a file of conf/arm/ ({', '.join(files)}); "
                f'write "{name}: <override> <override> ...".'
            )
        arms[name] = [*filter(None, [attached]), *part[1:]] if colon else [f"arm={name}"]
        part = []
    return arms


def size_overrides(cfg: DictConfig, size: int) -> list[str]:
    """The overrides of a composed configuration at another size, of which the number of layers is the one dial.

    The width grows with the layers, and the heads keep their channels. A step has training.batch_size sequences for
    each layer, and the number of steps stays. `rate_at` gives the learning rate.
    """
    model = cfg.model
    heads = max(1, round(size * model.n_heads / model.n_layers))
    return [
        f"model.n_layers={size}",
        f"model.n_embd={heads * (model.n_embd // model.n_heads)}",
        f"model.n_heads={heads}",
        f"training.batch_tokens={size * cfg.training.batch_size * cfg.seq_len}",
    ]


def rate_at(lr: float, layers: int, size: int) -> float:
    """The learning rate at a size, which falls with the root of the width.

    layers  of the model that trains with `lr`
    """
    return float(f"{lr * (layers / size) ** 0.5:.6g}")


def arena_mistakes(config: ArenaConfig, arms: Sequence[str]) -> Iterator[str]:
    """A sentence for each value of `arena.*` with which nothing could be decided."""
    if len(arms) < 2:
        yield f"arena.arms has {len(arms)} arm, and a comparison takes two or more; separate them with |."
    if config.seeds < 2:
        yield f"arena.seeds={config.seeds} shows no spread between seeds; use 2 or more."
    if not 0 < config.rules.margin < 1:
        yield (
            f"arena.rules.margin={config.rules.margin:g} must lie above 0 and below 1: the share of the loss that does "
            "not matter, such as 0.005."
        )
    if config.rules.looks < 1:
        yield f"arena.rules.looks={config.rules.looks} must be at least 1."
    if len(set(config.lr)) < len(config.lr) or not all(0 < factor < math.inf for factor in config.lr):
        yield f"arena.lr={config.lr} must hold different factors above 0, such as [0.5,1,2]; [] tries none."
    if config.sizes != sorted(set(config.sizes)) or any(size < 1 for size in config.sizes):
        yield f"arena.sizes={config.sizes} must hold different numbers of layers above 0, the smallest first."
    if not 0 <= config.rules.first_seed <= MOST_SEEDS - config.seeds:
        yield (
            f"arena.rules.first_seed={config.rules.first_seed} must lie between 0 and {MOST_SEEDS:,} less arena.seeds."
        )


def arm_mistakes(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each pair of equal arms, and for each setting that arms have to share and do not.

    settings  of each arm, by dotted names
    """
    trained = {  # without what does not affect training: the names of presets
        name: {key: value for key, value in of_arm.items() if key not in NAMES and not key.startswith("arena.")}
        for name, of_arm in settings.items()
    }
    for other, name in combinations(settings, 2):
        if trained[other] == trained[name]:
            yield f"arms {other} and {name} are the same configuration; leave one out, or give it other overrides."
    first = next(iter(settings))
    for name, of_arm in settings.items():
        differing = [key for key, value in settings[first].items() if _shared(key) and of_arm.get(key) != value]
        for key in differing[:1]:
            yield (
                f"arm {name} has {key}={of_arm.get(key)} and arm {first} has {key}={settings[first][key]}; arms train "
                "and are evaluated on the same tokens, so set it for all of them or for none."
            )


def _shared(key: str) -> bool:
    return key in SHARED or (key.split(".")[0] in SHARED_GROUPS and key not in OWN_DATA)
