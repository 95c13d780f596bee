"""Errors of the data, each a sentence for the user."""

from pathlib import Path

from errors import UserError


class DataError(UserError):
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
