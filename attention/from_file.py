"""Attention in a file or a module of the user's: attention=mine.py:RowsAttention."""

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from .errors import Option, UnsupportedAttention


def is_in_file(name: str) -> bool:
    """Whether an attention's name is <file>.py:<class or function>."""
    return ".py:" in name


def file_of(name: str) -> Path:
    """The file that such a name begins with."""
    return Path(name.rpartition(":")[0]).expanduser()


def digest_of(file: Path) -> str:
    """SHA-256 of the content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def load(name: str) -> Any:
    """What <file>.py:<name> or <module>:<name> names; a file runs once in a process. Raises UnsupportedAttention."""
    place, asked = name.rpartition(":")[0], Option("attention", name)
    if is_in_file(name) and not file_of(name).is_file():
        raise UnsupportedAttention("{} cannot be imported: there is no file {}.", asked, place)
    try:
        if os.getcwd() not in sys.path and not is_in_file(name):  # a module may lie in the current folder
            sys.path.insert(0, os.getcwd())
        found = run(file_of(name).resolve()) if is_in_file(name) else importlib.import_module(place)
        for part in name.rpartition(":")[2].split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "attention":
            raise UnsupportedAttention(
                "{} cannot be imported: the package attention is called gpt_attention outside its checkout; write "
                "gpt_attention in {}.", asked, place,
            ) from error  # fmt: skip
        raise UnsupportedAttention("{} cannot be imported: {}: {}.", asked, type(error).__name__, error) from error
    if not callable(found):
        raise UnsupportedAttention("{} is {}; name a class or a function.", asked, type(found).__name__)
    return found


@functools.cache
def run(file: Path) -> Any:
    """The module of a file, which may import others of its folder and of the current one."""
    for folder in (str(file.parent), os.getcwd()):
        if folder not in sys.path:
            sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"file:{file}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
