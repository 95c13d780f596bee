"""Options of earlier versions: refused on a command line with what to do instead, ignored at their recorded default."""

from __future__ import annotations

import pytest

from recipe.run.compose import mistakes
from recipe.run.config import is_key
from recipe.run.removed import DEFAULTS, REMOVED, is_at_removed_default, without_removed
from recipe.wording import as_typed


@pytest.mark.parametrize("removed", REMOVED)
def test_an_override_that_went_is_refused_with_what_to_do_instead(removed: str) -> None:
    line = f"{removed}depths=1" if removed.endswith(".") else removed if "=" in removed else f"{removed}=1"
    (sentence,) = mistakes(line)
    assert REMOVED[removed] in sentence


@pytest.mark.parametrize("option", DEFAULTS)
def test_a_recorded_default_of_an_option_that_went_is_ignored(option: str) -> None:
    assert not is_key(option)
    part, _, name = option.partition(".")
    assert without_removed({part: {name: DEFAULTS[option], "steps": 3}}) == {part: {"steps": 3}}
    assert is_at_removed_default(f"{option}={as_typed(DEFAULTS[option])}")
    assert not is_at_removed_default(f"{option}=7")


def test_the_table_has_at_most_forty_entries() -> None:
    assert len(REMOVED) <= 40
