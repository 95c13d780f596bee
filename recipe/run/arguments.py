"""key=value arguments as a dataclass, for the programs without Hydra: sample.py, eval.py and compare.py.

Hydra's grammar would need quotes around a prompt with spaces or commas. Here a value is everything after the first `=`.
"""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.errors import UserError

T = TypeVar("T")


class ArgumentError(UserError, ValueError):
    """An invalid argument; the message names the valid ones."""


def parse(arguments: Sequence[str], schema: type[T], program: str, verbatim: Collection[str] = ()) -> T:
    """An instance of the dataclass `schema`, typed, from key=value arguments.

    program   the script whose --help lists the arguments; attention.precision is the field attention_precision
    verbatim  keys whose value is any text, including the word null

    Raises ArgumentError for an unknown key or a value of the wrong type.
    """
    names = [f.name for f in fields(schema)]  # type: ignore[arg-type]
    config = OmegaConf.structured(schema)
    for argument in arguments:
        key, separator, value = argument.partition("=")
        key = key.replace(".", "_")
        if not separator and key in names:
            raise ArgumentError(f"{argument} has no value; write {argument}=<value>.")
        if not separator or key not in names:
            hint = suggestion(key, names) or f"; python {program} --help lists them."
            if not separator and "run" in names and Path(argument).expanduser().is_dir():
                hint = f"; did you mean run={argument}?"
            raise ArgumentError(f"{argument} is not an argument{hint}")
        try:
            config[key] = None if value == "null" and key not in verbatim else value
        except OmegaConfBaseException as error:
            raise ArgumentError(f"{argument} is not possible: {str(error).splitlines()[0]}.") from error
    return OmegaConf.to_object(config)  # type: ignore[return-value]


def suggestion(wrong: str, names: list[str]) -> str:
    """ "; did you mean x?" for the known name nearest to a wrong one, else nothing."""
    near = difflib.get_close_matches(wrong, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
