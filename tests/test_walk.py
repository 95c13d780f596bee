"""Who follows a run's configuration, or the runs of a page, from call to call keeps the place: folders come once, or
few times again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import compare
import train
from recipe.run.config import Config
from tests import programs

MOST_RETURNS = 12


def kinds(value: object) -> set[type]:
    """The type of a configuration, and those of its parts."""
    if not is_dataclass(value):
        return set()
    return {type(value)}.union(*(kinds(getattr(value, field.name)) for field in fields(value)))


@cache
def folder_of(file: str) -> str | None:
    """A package of the recipe, another package, or the top; None for a file that is not the project's."""
    if not file.startswith(str(programs.ROOT)) or ".venv" in file:
        return None
    parts = Path(file).relative_to(programs.ROOT).parts
    return "/".join(parts[:-1][: 2 if "recipe" in parts else 1])


def returns(function: Callable[[], Any], is_followed: Callable[[Any], bool]) -> int:
    """How often a call's trip comes back to a folder that it had left. The trip goes through each function once, in the
    order in which they are first called with what is followed."""
    passed, left, place, count = set[CodeType](), set[str](), "", 0

    def look(frame, event, _):
        nonlocal place, count
        code = frame.f_code
        if event != "call" or code in passed or (folder := folder_of(code.co_filename)) is None:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(is_followed(frame.f_locals.get(name)) for name in names):
            passed.add(code)
            if folder != place:
                count += folder in left
                left.add(place)
                place = folder

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    assert len(passed) > 20
    return count


def is_of_a_page(value: Any) -> bool:
    """Whether a value is a folder, or what compare.py makes of some."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Path) or type(first).__module__.startswith("recipe.compare")


@pytest.mark.slow
def test_folders_come_back_twelve_times_at_most(tmp_path, monkeypatch):
    configuration, trained = kinds(Config()), train.train
    walks: list[int] = []

    def followed(*arguments):
        status: list[int] = []
        walks.append(returns(lambda: status.append(trained(*arguments)), lambda x: type(x) in configuration))
        return status[0]

    monkeypatch.setattr(train, "train", followed)
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("A tale of two cities. " * 400)
    data = ["data=text", f"data.path={text}", f"data.cache={tmp_path}", "seq_len=32"]
    training = ["training.steps=3", "training.eval_batches=1", "training.sample_tokens=4", "model.n_layers=1"]
    assert programs.train(*data, *training, "device=cpu", "tracking.mode=disabled", f"hydra.run.dir={run}") == 0
    walks.append(returns(lambda: compare.main([str(run)]), is_of_a_page))
    assert max(walks) <= MOST_RETURNS
