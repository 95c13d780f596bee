"""The reference of the configuration: its meanings come from the dataclasses' docstrings."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from recipe.run.reference import meanings, section


@dataclass
class Part:
    """The options under `part.*`.

    size        of the thing, which may take
                a second line; None: as it comes
    left, right ends of it

    size is also a word of this sentence.
    """

    size: int | None = None
    left: bool = True
    right: tuple[float, float] = field(default=(0.5, 1.0))


def test_a_meaning_may_take_two_lines_and_serve_two_options():
    assert meanings(Part) == {
        "size": "of the thing, which may take a second line; null: as it comes",
        "left": "ends of it",
        "right": "ends of it",
    }


def test_a_default_is_written_as_an_override_has_it():
    rows = section(Part(), "part.").splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows]
    assert cells == [
        ["`part.size`", "`null`", "a whole number or `null`"],
        ["`part.left`", "`true`", "true or false"],
        ["`part.right`", "`[0.5, 1.0]`", "a list of numbers, such as [0.9,0.99]"],
    ]


def test_an_option_that_the_docstring_leaves_out_is_named():
    @dataclass
    class Gap:
        """Nothing about it."""

        size: int = 1

    with pytest.raises(ValueError, match="the docstring of Gap does not describe size"):
        meanings(Gap)
