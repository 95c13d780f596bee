"""The kind of failure a user can act on, and how a program ends with it."""

from __future__ import annotations

import sys
from typing import NoReturn


class UserError(Exception):
    """A failure explained in one sentence that names the offending value and what to change.

    Entry points print it as `error: ...` and exit with a non-zero status, without a traceback. They treat an
    AttentionError in the same way: attention/ is a library of its own and does not know this class.
    """


def fail(error: Exception) -> NoReturn:
    """Print each line of the error as a sentence of its own, and exit with status 1."""
    for sentence in str(error).splitlines():
        print(f"error: {sentence}", file=sys.stderr)
    sys.exit(1)
