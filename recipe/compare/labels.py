"""The differences between runs, as overrides: every label comes from the settings that a run recorded.

The typed overrides would not do: a repeated one, or one that a resumed run replaced, did not take effect.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from data.untrusted import read_yaml
from recipe import CONF
from recipe.compare.runs import Run
from recipe.files import flatten

# Settings in which runs may differ and still be compared step by step. Everything else has to be equal.
_FREE = (
    "seed", "resume", "device", "model.name", "data.cache", "hydra", "parity", "tracking", "attention", "arena",
    "ladder",
)  # fmt: skip
_FREE_TRAINING = (
    "log_every", "eval_every", "checkpoint_every", "keep_last", "profile", "sample_tokens",
    "cpu_memory_gib", "time_attention",
)  # fmt: skip
_GROUPS = ("data", "score", "optimizer", "model", "schedule")  # whose files in conf/ are choices, in its order
_NAMING = ("score", "model")  # a label that names a choice of these also names the settings that differ from it
_LONGEST = 3  # settings in a heading

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


def places(members: Sequence[Sequence[Run]], only: Collection[str] | None = None) -> list[Place]:
    """The settings in which groups of runs differ from each other: [("seq_len=512",), ("seq_len=1024",)].

    members  the runs of each group, which agree in the settings that may be used
    only     the names of these; None: all that count in a comparison

    A file of conf/ stands for the settings it makes, such as score=window, and settings that differ from it follow.
    A setting that most groups share is left out, unless nothing else remains.
    """
    keys = [comparison_key(runs[0]) for runs in members]
    if only is not None:
        keys = [{name: value for name, value in key.items() if name in only} for key in keys]
    differing = {name for name in set().union(*keys) if len({key.get(name) for key in keys}) > 1}
    choices = {
        group: chosen
        for group in _GROUPS
        if only is None or all(name in only for name in comparison_key(members[0][0]) if among(name, (group,)))
        if None not in (chosen := [_choice(runs, group) for runs in members]) and len(set(chosen)) > 1
    }
    made = [_made_by({group: str(chosen[n]) for group, chosen in choices.items()}, key) for n, key in enumerate(keys)]
    follow = {name for name in differing if _follows(name, keys, made, choices)}
    named = {f"{group}.name" for group in choices}
    usual = {name: common for name in differing if (common := _most_common([key.get(name) for key in keys]))}
    brief, whole = list[Place](), list[Place]()
    for n, key in enumerate(keys):
        departures = {name for name, value in made[n].items() if not _same(value, key[name])} - named
        of_names = {name for name in departures if among(name, [group for group in _NAMING if group in choices])}
        others = (differing - follow - made[n].keys() - named) | (departures & differing)
        chosen_here = [f"{group}={chosen[n]}" for group, chosen in choices.items()]
        unusual = {name for name in others if name not in usual or key.get(name) != usual[name][0]}
        for labels, names in ((brief, unusual | of_names), (whole, others | of_names)):
            labels.append((*chosen_here, *(f"{name}={_typed(key.get(name))}" for name in sorted(names))))
    brief = [short or long for short, long in zip(brief, whole, strict=True)]
    # The last one serves choices of one name that made different settings, in different versions of this recipe.
    every = [tuple(f"{name}={_typed(key.get(name))}" for name in sorted(differing)) for key in keys]
    return next((labels for labels in (brief, whole) if len(set(labels)) == len(labels)), every)


def headings(sweeps: Sequence[Sequence[Sequence[Run]]]) -> list[Place]:
    """The settings that a sweep's runs share and in which sweeps differ, for the runs of each cell of each sweep."""
    names = set.intersection(*(set(_shared(cells)) for cells in sweeps))
    return places([[run for cell in cells for run in cell] for cells in sweeps], names)


def names_apart(sweeps: Sequence[Sequence[Sequence[Run]]]) -> list[str]:
    """The settings of `headings` by name, with a group of conf/ for those in it where its choice differs."""
    shared = [_shared(cells) for cells in sweeps]
    names = {name for name in set.intersection(*map(set, shared)) if len({key[name] for key in shared}) > 1}
    groups = [group for group in _GROUPS if f"{group}.name" in names]
    return [*groups, *sorted(name for name in names if not among(name, groups))]


def _shared(cells: Sequence[Sequence[Run]]) -> dict[str, str]:
    """The settings in which the runs of all cells agree."""
    first, *others = [comparison_key(runs[0]) for runs in cells]
    return {name: value for name, value in first.items() if all(key.get(name) == value for key in others)}


def heading(place: Place) -> str:
    """A few of the settings, and how many more there are."""
    more = len(place) - _LONGEST
    return ", ".join(place[:_LONGEST]) + (f" and {more} more setting{'s' if more > 1 else ''}" if more > 0 else "")


def _choice(runs: Sequence[Run], group: str) -> str | None:
    """The file of conf/<group> that all runs name; None where they differ, or there is no such file."""
    names = {str(run.option(f"{group}.name")) for run in runs}
    return names.pop() if len(names) == 1 and names <= set(_files(group)) else None


def _files(group: str) -> list[str]:
    return [path.stem for path in (CONF / group).glob("*.yaml")]


def _made_by(choices: Mapping[str, str], key: Mapping[str, str]) -> dict[str, str]:
    """The settings of `key` that files of conf/ make, by their dotted names. A score has nothing that its file does not
    name."""
    made = {name: "null" for name in key if "score" in choices and among(name, ("score",))}
    for group, choice in choices.items():
        content = read_yaml(CONF / group / f"{choice}.yaml")
        nested = content if isinstance(content.get(group), dict) else {group: content}
        made |= {name: _printed(value) for name, value in flatten(nested).items() if name in key}
    return made


def _follows(
    name: str,
    keys: Sequence[Mapping[str, str]],
    made: Sequence[Mapping[str, str]],
    choices: Mapping[str, Sequence[str | None]],
) -> bool:
    """Whether a setting follows from a choice: a file makes it, and it is the same wherever that choice is."""
    if not any(name in of_files for of_files in made):
        return False
    for chosen in choices.values():
        pairs = {(choice, key.get(name)) for choice, key in zip(chosen, keys, strict=True)}
        if len(pairs) == len(set(chosen)):
            return True
    return False


def _most_common(values: Sequence[str | None]) -> tuple[str | None] | None:
    """The value that more groups have than any other; None without one."""
    (first, most), *others = Counter(values).most_common(2)
    return None if others and others[0][1] == most else (first,)


def _same(made: str, recorded: str | None) -> bool:
    """Whether a file's value is the recorded one: 6e-4 is read as text, and `off` may be null or false."""
    if recorded is None:
        return False
    if made == recorded or (made == "null" and recorded == "false"):
        return True
    try:
        return float(made.strip('"')) == float(recorded.strip('"'))
    except ValueError:
        return False


def _printed(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _typed(value: str | None) -> str:
    """A value as an override has it."""
    return "default" if value is None else value.strip('"')
