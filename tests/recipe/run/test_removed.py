"""Options of earlier versions: refused on a command line with what to do instead, ignored in a record that changes
nothing."""

import pytest

from recipe.run.compose import fits, mistakes, opened
from recipe.run.config import is_key
from recipe.run.removed import IGNORED, MOVED, REMOVED, as_today, config_as_today, is_ignored, without_removed
from recipe.wording import as_typed


@pytest.mark.parametrize("removed", REMOVED)
def test_an_override_that_went_is_refused_with_what_to_do_instead(removed):
    line = f"{removed}depths=1" if removed.endswith(".") else removed if "=" in removed else f"{removed}=1"
    (sentence,) = mistakes(line)
    assert REMOVED[removed] in sentence


@pytest.mark.parametrize("option", IGNORED)
def test_a_recorded_value_that_changes_nothing_is_ignored(option):
    part, _, name = option.partition(".")
    for value in IGNORED[option]:
        assert not (is_key(option) and fits(option, value))
        if name:  # else a choice of a file, which no configuration records
            assert without_removed({part: {name: value, "steps": 3}}) == {part: {"steps": 3}}
        assert is_ignored(f"{option}={as_typed(value)}")
    assert not is_ignored(f"{option}=-7")


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_option_that_moved_is_read_under_its_name_of_today(old, new):
    assert not is_key(old)
    assert is_key(new)
    assert opened(f"{old}=1") == f"{new}=1"
    (part, name), (_, option, entry) = old.split("."), new.split(".")
    assert config_as_today({part: {name: 7, "steps": 3}}) == {part: {option: {entry: 7}, "steps": 3}}
    assert as_today([f"{old}=7", "arena.stage=lr", "seed=1"]) == [f"{new}=7", "seed=1"]


def test_the_table_has_at_most_forty_entries():
    assert len(REMOVED) <= 40
