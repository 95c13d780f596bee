"""A run folder: the files in which the run records itself, and the lock that one process holds.

    .hydra/config.yaml      every option
    .hydra/overrides.yaml   the overrides of the command line
    summary.json            how it ended
    .lock                   held while it runs
    console.log             what it printed, of a job of a sweep and of the referee's runs

The folder may come from a stranger: it is read as data, in bounded time and memory.
"""

import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from data.atomic import write_atomically
from data.untrusted import UntrustedError, read_end, read_json, read_yaml
from recipe.errors import UserError

CONFIG, OVERRIDES, SUMMARY, LOCK = ".hydra/config.yaml", ".hydra/overrides.yaml", "summary.json", ".lock"
CONSOLE, OUTPUTS = "console.log", Path("outputs")


class StillRunning(UserError, RuntimeError):
    """Another process holds the folder."""


def write_recorded(folder: Path, config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Record a run's configuration, as plain values, and its overrides: without Hydra's, such as the folder, and those
    with references, whose values the configuration has."""
    of_recipe = [line for line in overrides if not line.startswith(("hydra.", "hydra/")) and "${" not in line]
    for name, content in ((CONFIG, dict(config)), (OVERRIDES, of_recipe)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_config_values(folder: Path) -> dict[str, Any]:
    """The configuration of a run, as recorded. Raises OSError, UntrustedError."""
    return _mapping(read_yaml(folder / CONFIG))


def read_overrides(folder: Path) -> list[str]:
    """The overrides of a run, as recorded. Raises OSError, UntrustedError."""
    lines = read_yaml(folder / OVERRIDES)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UntrustedError("is not a list of overrides")
    return lines


def read_summary(folder: Path) -> dict[str, Any]:
    """The content of summary.json. Raises OSError, UntrustedError."""
    return _mapping(read_json(folder / SUMMARY))


def last_line(folder: Path) -> str:
    """The last line of a run's console, or that there is none."""
    try:
        lines = read_end(folder / CONSOLE).split("\n")
    except (OSError, UntrustedError):
        lines = []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a message.")


@contextlib.contextmanager
def full_disk_explained(folder: Path, again: str) -> Iterator[None]:
    """Within the block, a full disk is a UserError that names `folder` and the overrides that go on in it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"{folder} could not be written ({error.strerror}); free some space there, and repeat the command with "
            f"{again}."
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block, this process alone holds the folder of a run or a sweep.

    A folder that was empty before and after is removed, with the empty ones above it in outputs/: a run that was
    refused leaves nothing. Raises StillRunning where another process has the folder.
    """
    lock, empty = FileLock(folder / LOCK), not any(folder.iterdir())
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StillRunning(f"{folder} belongs to a run that is still running; stop that one first.") from None
    try:
        yield
    finally:
        lock.release()
        if empty and [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            with contextlib.suppress(OSError):  # up to the first that is not empty
                folder.rmdir()
                for above in folder.parents if OUTPUTS in folder.parents else ():
                    above.rmdir()


def check_not_running(folder: Path) -> None:
    """Raise StillRunning where another process has the folder. Leaves it as it is."""
    if (folder / LOCK).exists():
        with locked(folder):
            pass


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UntrustedError("is not a mapping")
    return value
