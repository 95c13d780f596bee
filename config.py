"""The root configuration: the parts' dataclasses in one, known to Hydra, and checked as a whole."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from attention import AttentionConfig, AttentionShape, build_attention
from data.config import DataConfig
from data.corpora import CORPORA, check_data
from errors import UserError
from model.gpt import GPTConfig, check_config
from training.device import Precision, World, resolve_device, resolve_precision
from training.optimizer import OptimizerConfig, ScheduleConfig, check_optimizer
from training.parallel import ParallelConfig, check_parallel
from training.parity.probe import ParityConfig, ParityProbe
from training.profiling.profiler import Profiler
from training.step import TrainingConfig, check_training
from training.tracking.tracker import TrackingConfig


class ConfigError(UserError, ValueError):
    """An override that cannot be meant; the message says what can."""


@dataclass
class Config:
    """Everything a run is made from; `python train.py --help` explains it.

    seed       of everything random
    seq_len    tokens that enter the model at once
    device     auto, cpu, cuda or cuda:N
    resume     auto or a run folder: go on from its newest checkpoint
    init_from  a folder or name of GPT-2 weights to start from
    """

    seed: int = 1337
    seq_len: int = 128
    device: str = "auto"
    resume: str | None = None
    init_from: str | None = None
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def register() -> None:
    """Make Config the schema that conf/config.yaml starts from, so that every override is typed; and ${divide:a,b},
    which is a // b and at least 1, known to conf/experiment/."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("divide", lambda a, b: max(1, a // b), replace=True)


def keys(config_type: type = Config, prefix: str = "") -> Iterator[str]:
    """Every name that can be overridden: seed, ..., attention.name, ..."""
    hints = get_type_hints(config_type)
    for f in fields(config_type):
        if is_dataclass(hints[f.name]):
            yield from keys(hints[f.name], f"{prefix}{f.name}.")
        else:
            yield prefix + f.name


def suggestion(wrong: str, known: list[str]) -> str:
    """ "; did you mean x?" for the known name nearest to a wrong one, else nothing."""
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def check(config: Config) -> None:
    """Refuse, before anything is built or read, what could not train.

    Raises UserError (the part's own subclass) with the offending value and the override that repairs it.
    """
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed={config.seed} must lie between 0 and 2**32 - 1.")
    if config.seq_len < 1:
        raise ConfigError(f"seq_len={config.seq_len} must be at least 1.")
    check_parallel(config.parallel, World.from_environment().size)
    check_training(config.training, config.seq_len, World.from_environment())
    check_optimizer(config.optimizer, config.schedule, config.training.steps)
    check_config(config.model)
    check_data(config.data)
    CORPORA[config.data.name](config.data)  # finds the files, and reads none
    device = resolve_device(config.device)
    precision = resolve_precision(config.training.precision, device)
    if precision is Precision.fp32 and not config.training.residual_in_fp32:
        raise ConfigError(
            "training.residual_in_fp32=false has no effect in fp32 (training.precision="
            f"{config.training.precision.value} on {device}); leave it out, or set training.precision=bf16."
        )
    shape = attention_shape(config, device)
    build_attention(config.attention).check(shape)
    build_probe(config, shape)
    build_profiler(config, Path(), device, 0, print)


def attention_shape(config: Config, device: torch.device) -> AttentionShape:
    """What the model will ask of its attention."""
    return AttentionShape(
        head_dim=config.model.n_embd // config.model.n_heads,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.n_kv_heads or config.model.n_heads,
        dtype=resolve_precision(config.training.precision, device).dtype,
        device=device,
    )


def build_probe(config: Config, shape: AttentionShape) -> ParityProbe | None:
    """The parity probe, where one is asked for. Raises ParityError, UnsupportedAttention."""
    return ParityProbe(config.parity, config.attention, shape) if config.parity.every else None


def build_profiler(
    config: Config, folder: Path, device: torch.device, start: int, print: Callable[[str], None]
) -> Profiler:
    """What records some of the steps after `start` on the first rank, where that is asked for. Raises ProfileError."""
    wanted, first = config.training, World.from_environment().rank == 0
    return Profiler(
        folder,
        device,
        profile=wanted.profile and first,
        memory_snapshot=wanted.memory_snapshot and first,
        start=start,
        steps=wanted.steps,
        print=print,
    )


def as_plain(value: Any) -> Any:
    """Nested dicts, lists, numbers and names, from dataclasses, tuples and enums: what JSON and W&B know."""
    if is_dataclass(value):
        return {f.name: as_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.name
    return [as_plain(v) for v in value] if isinstance(value, list | tuple) else value


def check_resumable(recorded: dict[str, Any], config: Config) -> None:
    """Refuse to go on with another model or other data than a checkpoint was trained with. Raises ConfigError.

    recorded  the checkpoint's configuration, plain
    """
    now = as_plain(config)
    then_and_now = {"seq_len": (recorded["seq_len"], now["seq_len"])}
    for part, free in (("model", {"name", "dropout"}), ("data", {"cache"})):
        for name in now[part].keys() - free:
            then_and_now[f"{part}.{name}"] = recorded[part].get(name), now[part][name]
    for name, (then, new) in sorted(then_and_now.items()):
        if then != new:
            raise ConfigError(
                f"{name}={new} differs from the run's {name}={then}, whose weights would not fit it; leave it out, "
                "or start a new run without resume."
            )
