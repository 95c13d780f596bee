"""From overrides to a configuration or the jobs of a sweep, and the mistakes in single overrides."""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from attention.from_file import is_in_file
from recipe import CONF
from recipe.run.arguments import suggestion
from recipe.run.config import Config, ConfigError, holds_mapping, is_key, keys, register
from recipe.run.removed import moved, refusal
from recipe.run.wording import expected, explain, quoted_twice
from recipe.wording import as_typed

OPTIONAL = ("experiment", "arm")  # groups of which a run may have none
MOST_JOBS = 10_000  # of a sweep: each is composed and checked before the first one starts


def composed(overrides: list[str]) -> DictConfig:
    """The configuration that Hydra composes, with Hydra's options under `hydra`."""
    register()
    offer_files(overrides)
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="train"):
        return compose("config", overrides, return_hydra_config=True)


def offer_files(overrides: list[str]) -> None:
    """Make attention=<file>.py:<name>, where an override says so, a choice as if it were a file of conf/attention/."""
    for override in parsed([line for line in overrides if line.startswith("attention=") and ".py" in line]):
        name = override.value()
        if isinstance(name, str) and is_in_file(name):
            *groups, last = filter(None, ["attention", *name.split("/")])  # as Hydra looks them up
            ConfigStore.instance().store(group="/".join(groups), name=last, node={"name": name, "dropout": 0.0})


def checked(overrides: list[str]) -> DictConfig:
    """The configuration that overrides with one value compose. Raises ConfigError with a sentence for each mistake."""
    lines_today = [opened(line) for line in overrides]
    refuse([sentence for line in lines_today for sentence in mistakes(line)])
    try:
        return composed(lines_today)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error) from error


def to_config(cfg: DictConfig) -> Config:
    """Plain dataclasses from a composed configuration."""
    cfg = deepcopy(cfg)
    with open_dict(cfg):
        cfg.pop("hydra", None)
    return OmegaConf.to_object(cfg)  # type: ignore[return-value]


def refuse(sentences: list[str]) -> None:
    """Raise ConfigError with each distinct sentence on its own line, if there are any."""
    if sentences:
        raise ConfigError("\n".join(dict.fromkeys(sentences)))


def mistakes(line: str) -> Iterator[str]:
    """A sentence if an override is wrong in itself, with the likely correction; in a sweep, for each such value."""
    try:
        (override,) = parsed([line])
    except HydraException as error:
        yield str(explain(error))
        return
    key, known = override.key_or_group, [*choices(), *keys()]
    if override.is_hydra_override() or key.startswith("hydra/"):
        return
    if override.is_delete():
        yield f"{line} would leave {key} without a value; write {key}=<value>."
    elif not key:
        yield f"{line} is not an override; write key=value without blanks."
    elif (sentence := refusal(key) or refusal(line)) is not None:
        yield sentence
    elif key not in known and not is_key(key):
        namesakes = [name for name in known if "." in name and name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = f"; did you mean {' or '.join(namesakes)}?" if namesakes else suggestion(key, known)
        yield f"{line} overrides nothing, as there is no {key}{hint or '; python train.py --help lists all overrides.'}"
    elif override.is_interval_sweep() or isinstance(override.value(), Glob):
        yield f"{line} names no single values, which a sweep has: {key}=range(1,9,2), or {key}=1,3,5."
    elif override.is_choice_sweep():
        for value in swept_values(override):
            yield from mistakes(f"{override.get_key_element()}={value}")
    elif key in choices():
        yield from choice_mistakes(key, override.value())
    elif not override.is_sweep_override() and not fits(key, override.value()):
        yield f"{line.lstrip('+')} is not {expected(key)}."


def choice_mistakes(group: str, value: Any) -> Iterator[str]:
    """A sentence if a value names no file of a folder of conf/."""
    files = sorted(choices()[group])
    if value is None and group in OPTIONAL:
        return
    name = str(value)
    if name not in files and not (group == "attention" and is_in_file(name)):
        hint = suggestion(name, files) or "."
        if group == "data" and name and Path(name).exists():
            hint = f"; to train on your text, use data=text data.path={name}."
        yield f"{group}={as_typed(value)} is not known; choose one of {', '.join(files)}{hint}"


def fits(key: str, value: Any) -> bool:
    """Whether an option may have this value, by its type."""
    try:
        OmegaConf.update(deepcopy(schema()), key, value)
    except OmegaConfBaseException:
        return False
    return True


@functools.cache
def schema() -> DictConfig:
    """A configuration to try values on."""
    return OmegaConf.structured(Config)


def expand_home(argument: str) -> str:
    """key=~/text as a shell would expand it; Hydra's grammar has no tilde in a value."""
    return re.sub(r"(?<=[=,])~(?=/)", lambda _: str(Path.home()), argument)


def opened(line: str) -> str:
    """An override of a mapping of any names, or of an entry of one, as Hydra takes it: only with a ++ may names be new.
    One that has moved stands under its name of today."""
    line = moved(line)
    key = line.partition("=")[0]
    of_mapping = any(option in keys() and holds_mapping(option) for option in (key, key.rpartition(".")[0]))
    return f"++{line}" if of_mapping else line


def as_hydra_reads(argument: str) -> str:
    """An argument in Hydra's grammar, which has no tilde in a value, and an equals sign in quoted ones only."""
    key, equals, value = argument.partition("=")
    if key == "arena.arms" and equals and value[:1] not in ("'", '"'):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{key}="{escaped}"'
    return opened(formula_quoted(expand_home(argument)))


def formula_quoted(argument: str) -> str:
    """score.formula=s * log(n), which Hydra's grammar does not read, with quotes; any other argument as it is."""
    key, _, value = argument.partition("=")
    if key == "score.formula":
        try:
            parsed([argument])
        except HydraException:
            return f"{key}={quoted(value)}"
    return argument


def jobs(overrides: list[str]) -> list[list[str]]:
    """The overrides of each job of a sweep: every combination of the command line's and the experiment's values."""
    params = composed(unswept(overrides)).hydra.sweeper.params or {}
    values = {
        o.get_key_element(): swept_values(o) if o.is_sweep_override() else [o.get_value_element_as_str()]
        for o in parsed([f"{key}={value}" for key, value in params.items()] + overrides)
        if not o.is_hydra_override()
    }
    if math.prod(map(len, values.values())) > MOST_JOBS:
        raise ConfigError(f"The sweep has more than {MOST_JOBS:,} jobs; take fewer values, or several sweeps.")
    return [[f"{key}={v}" for key, v in zip(values, job, strict=True)] for job in itertools.product(*values.values())]


def swept_values(override: Override) -> list[str]:
    """The values of an override with several, at most one more than a sweep may have jobs."""
    return list(itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1))


def swept_mistakes(overrides: list[str]) -> list[str]:
    """A sentence for each override with several values, for a command that is no sweep."""
    single = unswept(overrides)
    return [
        f"{line} is more than one value; add -m for a run with each, or quote a value with commas twice: "
        f"{quoted_twice(line)}."
        for line in overrides
        if line not in single
    ]


def unswept(overrides: list[str]) -> list[str]:
    """The overrides with one value."""
    return [line for line, o in zip(overrides, parsed(overrides), strict=True) if not o.is_sweep_override()]


def parsed(overrides: list[str]) -> list[Override]:
    """The overrides as Hydra reads them."""
    return OverridesParser.create().parse_overrides(overrides)


def by_key(overrides: list[str]) -> dict[str, Override]:
    """Overrides by key; a later one replaces an earlier one."""
    return {o.key_or_group: o for o in parsed(overrides)}


def lines(overrides: dict[str, Override]) -> list[str]:
    """The overrides as on a command line."""
    return [str(override.input_line) for override in overrides.values()]


@functools.cache
def choices() -> dict[str, set[str]]:
    """attention, model, ...: the folders of conf/, and the files of each without their ending."""
    return {
        folder.name: {file.stem for file in folder.glob("*.yaml")}
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name != "hydra"
    }


def quoted(value: str) -> str:
    """`value` as a quoted string in Hydra's grammar of overrides."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
