"""The kind of failure a user can act on, and how a program ends with it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn


class UserError(Exception):
    """A failure explained in one sentence that names the offending value and what to change.

    Entry points print it as `error: ...` and exit with a non-zero status, without a traceback. They treat an
    AttentionError in the same way: attention/ is a separate library and does not know this class.
    """


def fail(error: Exception) -> NoReturn:
    """Print each line of the error as a separate sentence, for torchrun too, and exit with status 1."""
    sentences = "\n".join(f"error: {sentence}" for sentence in str(error).splitlines())
    print(sentences, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # When a rank fails, torchrun prints its own traceback, and below it what the rank wrote to this file.
        written = {"message": {"message": sentences, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(file).write_text(json.dumps(written), encoding="utf-8")
    sys.exit(1)
