"""The reference of the configuration, for docs/configuration.md and its second page: every override, from the
dataclasses and their docstrings. `make tables` writes it."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from recipe.run.compose import choices, composed, to_config
from recipe.run.config import Config, type_hints
from recipe.wording import as_typed, markdown_table

OPTION = re.compile(r"^    (\w+(?:, \w+)*) +(\S.*)$")  # one name or several, then their meaning
CONTINUED = re.compile(r"^     +(\S.*)$")
FIRST_PAGE = ("attention", "score", "model", "data")  # the parts that docs/configuration.md describes


def meanings(config_type: type) -> dict[str, str]:
    """The option's name -> its meaning, from a dataclass's docstring in columns. Raises ValueError for a gap."""
    texts: dict[str, str] = {}
    names, last = [f.name for f in fields(config_type)], list[str]()
    for line in (config_type.__doc__ or "").splitlines():
        option, continued = OPTION.match(line), CONTINUED.match(line)
        if option and set(option[1].split(", ")) <= set(names):
            last = option[1].split(", ")
            texts |= dict.fromkeys(last, option[2])
        elif continued:
            texts |= {name: f"{texts[name]} {continued[1]}" for name in last}
        elif last:
            break  # the columns are one paragraph
    hints = type_hints(config_type)
    for name in names:
        if name not in texts and not is_dataclass(hints[name]):
            raise ValueError(f"the docstring of {config_type.__name__} does not describe {name}.")
    return {name: re.sub(r"\bNone\b", "null", text) for name, text in texts.items()}


def value_name(value: object) -> str:
    """A default value as it is written in an override."""
    if isinstance(value, Enum):
        return f"`{value.name}`"
    return f"`{list(value) if isinstance(value, tuple) else as_typed(value)}`"


def values(value: object) -> str:
    """The values of an option that has a few names, before its meaning; nothing for others."""
    return ", ".join(f"`{one.name}`" for one in type(value)) + ": " if isinstance(value, Enum) else ""


def section(config: Any, prefix: str) -> str:
    """The table of one dataclass."""
    lines = ([cell.replace("|", "\\|") for cell in row] for row in rows(config, prefix))
    return markdown_table(["override", "default", "meaning"], lines)


def rows(config: Any, prefix: str) -> Iterator[list[str]]:
    """A row for each option of a part; the root's parts have separate tables."""
    described = meanings(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        if not is_dataclass(value):
            yield [f"`{prefix}{f.name}`", value_name(value), values(value) + described[f.name]]
        elif prefix:
            entries = [f"`{name}`: {text}" for name, text in meanings(type(value)).items()]
            yield [f"`{prefix}{f.name}`", "", ". ".join([f"{described[f.name]}; a mapping", *entries])]


def configuration() -> str:
    """The root's options, and a section for each part that determines what is computed."""
    config = to_config(composed([]))
    return "\n\n".join([section(config, ""), *sections(config, FIRST_PAGE)])


def training() -> str:
    """A section for each other part, and the experiments."""
    config = to_config(composed([]))
    names = [f.name for f in fields(config) if f.name not in FIRST_PAGE and is_dataclass(getattr(config, f.name))]
    experiments = ", ".join(f"`{name}`" for name in sorted(choices()["experiment"]))
    return "\n\n".join([*sections(config, names), f"## experiment\n\n`experiment=` chooses one of {experiments}."])


def sections(config: Config, parts: Iterable[str]) -> Iterator[str]:
    """A section for each of these parts: the presets of its group, and its options."""
    for name in parts:
        presets = ", ".join(f"`{preset}`" for preset in sorted(choices().get(name, ())))
        chosen = f"`{name}=` chooses a preset of [conf/{name}/](../conf/{name}): {presets}.\n\n"
        yield f"## {name}\n\n{chosen if presets else ''}{section(getattr(config, name), f'{name}.')}"
