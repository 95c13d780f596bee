"""The audit's judge accepts a refusal in one sentence, and nothing else."""

from __future__ import annotations

import pytest

from tests.audit.__main__ import Ending
from tests.audit.mistakes import MISTAKES

SENTENCE = "error: tokens=-1 must be at least 0."


@pytest.mark.parametrize(
    ("ending", "flaw"),
    [
        (Ending(1, SENTENCE, 0.1, []), None),
        (Ending(2, "usage: python -m x [-h]\n" + "  [--a]\n" * 20 + "python -m x: error: tokens=-1\n", 0.1, []), None),
        (Ending(None, SENTENCE, 30.0, []), "does not end within 30 s"),
        (Ending(0, SENTENCE, 0.1, []), "is accepted"),
        (Ending(1, f"Traceback (most recent call last):\n{SENTENCE}", 0.1, []), "ends in a traceback"),
        (Ending(1, " \n", 0.1, []), "ends without a word"),
        (Ending(1, "error: invalid", 0.1, []), "does not name the cause"),
        (Ending(1, SENTENCE + "\n." * 9, 0.1, []), "takes more than 8 lines"),
        (Ending(1, SENTENCE, 0.1, ["run/summary.json"]), "changes run/summary.json"),
    ],
)
def test_only_a_short_refusal_that_names_the_cause_and_changes_nothing_is_right(
    ending: Ending, flaw: str | None
) -> None:
    assert ending.flaw("tokens=-1") == flaw


def test_every_program_has_mistakes() -> None:
    programs = {line.split()[1] if line.startswith("-m") else line.split()[0] for line in MISTAKES}
    assert programs >= {"train.py", "sample.py", "eval.py", "compare.py", "attention", "learn", "bench.release"}
    assert len(MISTAKES) >= 150
