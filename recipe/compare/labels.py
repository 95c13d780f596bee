"""The differences between runs, as overrides: every label comes from the settings that a run recorded.

The typed overrides would not do: a repeated one, or one that a resumed run replaced, did not take effect.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recipe import CONF
from recipe.compare.runs import UNKNOWN, Run

# Settings in which runs may differ and still be compared step by step. Everything else has to be equal.
_FREE = ("seed", "resume", "device", "model.name", "data.cache", "hydra", "parity", "tracking", "attention", "arena")
_FREE_TRAINING = (
    "log_every", "eval_every", "checkpoint_every", "keep_last", "profile", "sample_tokens", "cpu.memory_gib",
)  # fmt: skip
_GROUPS = ("data", "score", "optimizer", "model", "schedule")  # whose names are choices of files in conf/
_OFF = ("null", "false")

Place = tuple[str, ...]


def comparison_key(run: Run) -> dict[str, str]:
    """The settings two runs must share for their curves to be compared; the devices are among them."""
    settings = {name: value for name, value in run.settings.items() if not free(name)}
    settings |= {"training.precision": run.precision, "device": run.device, "devices": run.devices}
    return {name: _printed(value) for name, value in sorted(settings.items())}


def free(name: str) -> bool:
    """Whether runs that differ in this setting may be compared step by step."""
    if name == "attention.dropout":
        return False
    return name.removeprefix("training.") in _FREE_TRAINING or among(name, _FREE)


def among(name: str, groups: Iterable[str]) -> bool:
    """Whether a dotted name is one of `groups` or lies in one."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def places(members: Sequence[Sequence[Run]]) -> list[Place]:
    """The settings in which groups of runs differ from each other: [("seq_len=512",), ("seq_len=1024",)].

    members  the runs of each group; a setting that varies within one is not named

    The choice of a file in conf/, such as score=window, stands for the settings of its group that are the same
    wherever that choice is.
    """
    names = {name for runs in members for run in runs for name in comparison_key(run)}
    keys = [_shared(runs, names) for runs in members]
    shared = set.intersection(*map(set, keys))
    differing = sorted(name for name in shared if len({key[name] for key in keys}) > 1)
    choices = [name for name in differing if name in _GROUPS]
    settings = [name for name in differing if name not in choices and not _follows(name, keys, choices)]
    if "score" in choices:  # score=causal says that there is no window
        alike = {name for name in shared - {*differing} if among(name, ("score",)) and keys[0][name] not in _OFF}
        settings = sorted({*settings, *alike})
    return [tuple(f"{name}={_typed(key[name])}" for name in (*choices, *settings)) for key in keys]


def _shared(runs: Sequence[Run], names: Iterable[str]) -> dict[str, str]:
    """The settings in which runs agree, with the files of conf/ that all name: {"score": "window"}.

    Runs that were killed before they recorded a device count only where there are no others.
    """
    keys = [comparison_key(run) for run in runs if run.device != UNKNOWN] or [comparison_key(runs[0])]
    result = {name: keys[0].get(name, "default") for name in names if len({key.get(name) for key in keys}) == 1}
    for group in _GROUPS:
        chosen = {str(run.option(f"{group}.name")) for run in runs}
        if len(chosen) == 1 and chosen <= {path.stem for path in (CONF / group).glob("*.yaml")}:
            result[group] = chosen.pop()
    return result


def _follows(name: str, keys: Sequence[Mapping[str, str]], choices: Sequence[str]) -> bool:
    """Whether a setting is the same wherever the choice of its group is."""
    group = name.partition(".")[0]
    pairs = {(key.get(group), key[name]) for key in keys}
    return group in choices and len(pairs) == len({choice for choice, _ in pairs})


def _printed(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _typed(value: str) -> str:
    """A value as an override has it."""
    return value.strip('"')
