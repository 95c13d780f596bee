"""Errors of the data, each a sentence for the user."""

from collections.abc import Sequence
from pathlib import Path


class DataError(Exception):
    """Data that cannot be found, read, tokenised or cut into windows."""


def brief(error: BaseException) -> str:
    """An exception of another library in a few words, for use in brackets."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file or folder that cannot be read."""
    return DataError(
        f"{path} cannot be read ({error.strerror or error}); make it readable, or set another file or folder with "
        "data.path=..."
    )


def first_few(names: Sequence[object]) -> str:
    """At most four names, and how many more there are."""
    more = len(names) - 4
    return ", ".join(map(str, names[:4])) + (f" and {more} more" if more > 0 else "")
