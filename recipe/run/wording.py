"""One sentence for each error of Hydra and OmegaConf, which take several lines."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from recipe.errors import UserError, fail, refusals
from recipe.run.config import ConfigError, declared
from recipe.run.jobs import failed_job


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """End the process with status 1 and a sentence, without a traceback, for a failure that a user can act on."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        fail(explain(error))
    except refusals() as error:
        fail(error)
    except RuntimeError as error:
        failed = failed_job(error)
        if failed is None:
            raise
        fail(failed)
    except KeyboardInterrupt:
        sys.exit(130)


def explain(error: Exception) -> UserError:
    """One sentence for an error of Hydra's or OmegaConf's."""
    cause = error.__cause__ or error
    if isinstance(cause, UserError):  # raised by a launcher; Hydra wraps it
        return cause
    if isinstance(error, MissingConfigException) and "hydra/launcher/submitit_" in str(error.missing_cfg_file):
        return ConfigError(
            "hydra/launcher=slurm needs Hydra's submitit launcher; install it with: pip install -e '.[slurm]'"
        )
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override} is not an override; write key=value, and quote a value with special characters twice: "
            f"{quoted_twice(str(error.override))}."
        )
    return ConfigError(" ".join(" ".join(str(e).split()) for e in dict.fromkeys((error, cause))))


def quoted_twice(line: str) -> str:
    """An override whose value is text with special characters, as it is typed in a shell."""
    key, equals, value = line.partition("=")
    in_shell = value.replace('"', '\\"').replace("'", "'\\''")
    return f"""'{key}="{in_shell}"'""" if equals and key else "'key=\"a b\"'"


def expected(key: str) -> str:
    """The values that `key` accepts, in words."""
    return in_words(declared(key))


def in_words(kind: Any) -> str:
    """The values of an option's type, other than null."""
    if is_dataclass(kind):
        return "a mapping of " + ", ".join(f.name for f in fields(kind))
    if get_origin(kind) is UnionType:
        kind, other = get_args(kind)
        if other is str:
            return "a whole number or auto"
    if get_origin(kind) in (list, tuple):
        return f"a list [x,y,...], where each is {in_words(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "a mapping, such as {name:value}"
    if issubclass(kind, Enum):
        return "one of " + ", ".join(member.name for member in kind)
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "text or a list of it"}
    return words[kind]
