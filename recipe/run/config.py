"""The root configuration: the dataclasses of all parts in one, registered with Hydra."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from attention import AttentionConfig
from data.options import DataConfig
from model.options import GPTConfig
from model.score import ScoreConfig
from recipe.distributed.options import ParallelConfig
from recipe.errors import UserError
from recipe.run.arms import ArenaConfig
from recipe.run.tracker import TrackingConfig
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.parity_probe import ParityConfig


class ConfigError(UserError, ValueError):
    """An invalid override; the message names valid ones."""


@dataclass
class Config:
    """The whole configuration of a run; `python train.py --help` explains it.

    seed       for everything random
    seq_len    length of a sequence, in tokens
    device     auto, cpu, cuda or cuda:N
    resume     auto or a run folder: continue from its newest checkpoint
    init_seed  for the initial weights alone; None: seed
    init_from  the folder or name on the hub that gives weights, model, score and tokenizer (docs/models.md)
    probes     measured with every evaluation, such as [mqar,position_loss] (docs/recall.md)
    """

    seed: int = 1337
    seq_len: int = 128
    device: str = "auto"
    resume: str | None = None
    init_seed: int | None = None
    init_from: str | None = None
    probes: list[str] = field(default_factory=list)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    arena: ArenaConfig = field(default_factory=ArenaConfig)


@functools.cache  # it stays for all configurations of this process
def register() -> None:
    """Make Config the schema that conf/config.yaml starts from, so that every override is typed. conf/experiment/ also
    finds ${divide:a,b}, which is a // b and at least 1, and ${min:a,b}; a run folder's name has ${after_colon:text}."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("divide", lambda a, b: max(1, a // b), replace=True)
    OmegaConf.register_new_resolver("min", min, replace=True)
    OmegaConf.register_new_resolver("after_colon", lambda text: text.rpartition(":")[2], replace=True)


type_hints = functools.cache(get_type_hints)  # compiles every annotation


def keys() -> Iterator[str]:
    """The names of all options: seed, ..., attention.name, ..."""
    for part, kind in type_hints(Config).items():
        yield from (f"{part}.{f.name}" for f in fields(kind)) if is_dataclass(kind) else [part]


def is_key(name: str) -> bool:
    """Whether an override may have this name: an option's, or an entry's in an option that is a mapping."""
    known, (option, _, entry) = set(keys()), name.rpartition(".")
    return name in known or (option in known and (holds_mapping(option) or entry in entries(option)))


def entries(option: str) -> dict[str, Any]:
    """The types of the entries of an option that is a mapping of fixed names, such as model.rope_scaling; else none."""
    kind: type = declared(option)
    return type_hints(kind) if is_dataclass(kind) else {}


def holds_mapping(key: str) -> bool:
    """Whether the option holds a mapping of any names, such as score.learned."""
    kind = declared(key)
    return any(get_origin(one) is dict for one in (kind, *get_args(kind)))


def declared(key: str) -> Any:
    """The type of a value of `key`."""
    kind: Any = Config
    for name in key.split("."):
        kind = type_hints(kind)[name]
    return kind
