"""The kind of failure a user can act on, and how a program ends with it."""

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from recipe.wording import as_typed


class UserError(Exception):
    """A failure explained in one sentence that names the offending value and what to change.

    Entry points print it as `error: ...` and exit with a non-zero status, without a traceback. They treat the errors of
    attention/, data/ and model/, which do not know this class, in the same way: see `refusals`.
    """


SECONDS_FOR_THE_FIRST_RANK = 5.0
# The packages below the recipe, and the base class of their errors.
OF_LIBRARIES = {
    "attention.errors": "AttentionError",
    "data.errors": "DataError",
    "model.options": "ModelError",
    "mixers.recurrence": "MixerError",
}


def refusals() -> tuple[type[Exception], ...]:
    """The errors that are a sentence for the user: `except refusals() as error`.

    A package that nobody has imported cannot have raised one, and is not imported here: some programs need no torch.
    """
    libraries = ((sys.modules.get(package), name) for package, name in OF_LIBRARIES.items())
    return (UserError, *(getattr(package, name) for package, name in libraries if package is not None))


# Overrides whose names differ from the options' names in attention/.
OVERRIDES = {"layout.documents": "data.documents=mask", "formula": "score.formula"}


def sentence_of(error: Exception) -> str:
    """The error's sentence, with the overrides of the command line for the options that attention/ names."""
    worded = getattr(error, "worded", None)
    return str(error) if worded is None else worded(as_override)


def as_override(option: tuple[str, object]) -> str:
    """An attention.errors.Option as an override."""
    name, value = option
    return OVERRIDES.get(name, f"{name}={as_typed(value)}")


def fail(error: Exception) -> NoReturn:
    """Print each sentence of the error on a line, or have torchrun print them, and exit with status 1.

    An indented line, such as a formula with the mistake marked, belongs to the sentence above it.
    """
    lines = sentence_of(error).splitlines()
    sentences = "\n".join(line if line.startswith(" ") else f"error: {line}" for line in lines)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # When a rank fails, torchrun prints a traceback, and below it the content of this file of each rank. Most
        # errors occur on all ranks. torchrun then ends the others while they wait here, and prints the sentence once.
        if int(os.environ.get("RANK", "0")) > 0:
            time.sleep(SECONDS_FOR_THE_FIRST_RANK)
        written = {"message": {"message": sentences, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(file).write_text(json.dumps(written), encoding="utf-8")
    else:
        print(sentences, file=sys.stderr)
    sys.exit(1)


def refuse_windows_lines() -> None:
    """End the program where an argument ends in a carriage return, as in a script that was saved on Windows."""
    for argument in sys.argv[1:]:
        if argument.endswith("\r"):
            name = argument.strip() or "an argument"
            fail(UserError(f"{name} ends in a carriage return; repair the script with sed -i 's/\\r$//' <script>."))
