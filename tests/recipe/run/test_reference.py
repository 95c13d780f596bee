"""The reference of the configuration: its meanings come from the dataclasses' docstrings."""

from dataclasses import dataclass, field
from enum import Enum

import pytest

from recipe.run.reference import meanings, section


class Side(Enum):
    front = 1
    back = 2


@dataclass
class Part:
    """The options under `part.*`.

    size        of the thing, which may take
                a second line; None: as it comes
    left, right ends of it
    side        where it stands

    size is also a word of this sentence.
    """

    size: int | None = None
    left: bool = True
    right: tuple[float, float] = field(default=(0.5, 1.0))
    side: Side = Side.back


def test_a_meaning_may_take_two_lines_and_serve_two_options():
    assert meanings(Part) == {
        "size": "of the thing, which may take a second line; null: as it comes",
        "left": "ends of it",
        "right": "ends of it",
        "side": "where it stands",
    }


def test_a_default_is_written_as_an_override_has_it_and_names_before_the_meaning():
    rows = section(Part(), "part.").splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:4]] for row in rows]
    assert cells == [
        ["`part.size`", "`null`", "of the thing, which may take a second line; null: as it comes"],
        ["`part.left`", "`true`", "ends of it"],
        ["`part.right`", "`[0.5, 1.0]`", "ends of it"],
        ["`part.side`", "`back`", "`front`, `back`: where it stands"],
    ]


def test_an_option_that_the_docstring_leaves_out_is_named():
    @dataclass
    class Gap:
        """Nothing about it."""

        size: int = 1

    with pytest.raises(ValueError, match="the docstring of Gap does not describe size"):
        meanings(Gap)
