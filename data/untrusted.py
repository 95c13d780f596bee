"""Reading YAML, JSON and text that may come from a stranger: as data, in bounded time and memory.

A reader refuses a file that is no regular file, is larger than its limit, or holds values nested deeper than DEEPEST.
YAML may have no aliases, with which a few lines can stand for gigabytes.
"""

import io
import json
import os
import pickle
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

MIB = 1 << 20
# The largest files, in bytes.
SETTINGS = MIB // 4  # a configuration, a list of overrides
RECORD = 64 * MIB  # a summary, a manifest
TOKENIZER = 256 * MIB
METRICS = 1024 * MIB
LINE = 256 * MIB  # of a text or of a list of tasks
CONSOLE_END = MIB // 4  # the end of a console's output, which may be longer
DEEPEST = 64
LARGEST_INTEGER = 2**64
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without its loader in C


class UntrustedError(ValueError):
    """A file that is refused; the message completes the sentence "<file> ..."."""


def read_bytes(path: Path, limit: int, *, pipe: bool = False) -> bytes:
    """The content of a regular file. Raises OSError, and UntrustedError beyond `limit` bytes.

    pipe  whether it may be a pipe, such as <(command) in a shell, which waits for its writer
    """
    with _opened(path, pipe) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UntrustedError(f"is larger than {limit / MIB:g} MiB")
    return content


@contextmanager
def _opened(path: Path, pipe: bool = False) -> Iterator[IO[bytes]]:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipe else os.O_NONBLOCK)), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not (stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode))):
            raise UntrustedError("is not a regular file")
        yield file


def read_end(path: Path, limit: int = CONSOLE_END) -> str:
    """The last `limit` bytes of a regular file as text, with a mark in place of what is not UTF-8. Raises OSError,
    UntrustedError."""
    with _opened(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - limit))
        return file.read(limit).decode("utf-8", errors="replace")


def read_text(path: Path, limit: int = SETTINGS, *, pipe: bool = False) -> str:
    """The content of a file in UTF-8, read as by `read_bytes`. Raises OSError, UntrustedError."""
    try:
        return read_bytes(path, limit, pipe=pipe).decode("utf-8")
    except UnicodeDecodeError:
        raise UntrustedError("is not UTF-8") from None


def read_json(path: Path, limit: int = RECORD) -> Any:
    """The value in a file of JSON. Raises OSError, UntrustedError."""
    return parse_json(read_text(path, limit))


def parse_json(text: str | bytes) -> Any:
    """The value of a text in JSON. Raises UntrustedError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UntrustedError("is not JSON") from None
    check_value(value)
    return value


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists and mappings alone; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise UntrustedError(f"names {module}.{name}")


def read_plain_pickle(path: Path) -> Any:
    """The plain value in a pickle, of which nothing is run. Raises OSError, UntrustedError."""
    try:
        return _PlainUnpickler(io.BytesIO(read_bytes(path, RECORD))).load()
    except UntrustedError:
        raise
    except Exception:  # a damaged pickle raises any kind
        raise UntrustedError("is no pickle of plain values") from None


def has_half_characters(value: Any) -> bool:
    """Whether a text in a value of JSON holds half a character, such as \\ud800, which no file in UTF-8 can hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_yaml(path: Path) -> Any:
    """The value in a file of YAML without aliases. Raises OSError, UntrustedError."""
    text = read_text(path)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise UntrustedError("has an alias")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise UntrustedError(f"is nested deeper than {DEEPEST}")
        value = yaml.load(text, Loader=LOADER)
    except UntrustedError:
        raise
    except (yaml.YAMLError, ValueError):
        raise UntrustedError("is not YAML") from None
    check_value(value)
    return value


def check_value(value: Any) -> None:
    """Raise UntrustedError for values nested deeper than DEEPEST, and for integers that need more than 64 bits."""
    layer, depth = [value], 0
    while layer:
        if any(type(item) is int and abs(item) > LARGEST_INTEGER for item in layer):
            raise UntrustedError("has an integer of more than 64 bits")
        layer = [child for item in layer for child in children(item)]
        depth += 1
        if depth > DEEPEST:
            raise UntrustedError(f"is nested deeper than {DEEPEST}")


def children(item: Any) -> Iterator[Any]:
    """The values directly within a mapping or a list."""
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, list):
        yield from item
