"""Refusals: one sentence each, in which every program can name options in its users' notation."""

from collections.abc import Callable
from typing import NamedTuple


class Option(NamedTuple):
    """An option of the caller that a refusal names, such as Option("attention.path", "hopper").

    name   attention for the implementation, attention.<field> and score.<field> for the fields of AttentionConfig and
           Score, layout.<field> for the fields of Layout, cache, or formula for the text itself
    """

    name: str
    value: object = True


class AttentionError(ValueError):
    """A refusal in one sentence that names the offending value and the remedy.

    template, parts  the sentence, with {} where a part stands: an Option, or anything that `format` prints

    `str` writes Options as arguments in Python: path="hopper". `worded` takes another notation.
    The base of ScoreError and UnsupportedAttention.
    """

    def __init__(self, template: str, *parts: object) -> None:
        super().__init__(template, *parts)
        self.template, self.parts = template, parts

    def __str__(self) -> str:
        return self.worded(in_python)

    def worded(self, word: Callable[[Option], str]) -> str:
        """The sentence, with word(option) for each Option."""
        if not self.parts:
            return self.template
        return self.template.format(*(word(part) if isinstance(part, Option) else part for part in self.parts))


class ScoreError(AttentionError):
    """An invalid score or layout; the message names the valid values."""


class FormulaError(ScoreError):
    """An invalid formula; the message shows the place where it has one."""


class UnsupportedAttention(AttentionError):
    """A combination that the chosen implementation does not support; the message names the remedy."""


def no_dropout(name: str, rate: float) -> UnsupportedAttention:
    """The refusal of dropout by an implementation without dropout."""
    template, names = listed(["naive", "tiled", "flash"])
    return UnsupportedAttention(
        f"{{}} has no dropout; set {{}} instead of {rate}, or choose {template}.",
        Option("attention", name),
        Option("attention.dropout", 0),
        *names,
    )


# Words for features that do not follow from one field's value.
PHRASES = {
    "layout.documents": "document bounds",
    "layout.offsets": "q_start or k_start",
    "layout.lengths": "a layout's lengths",
    "cache": "a cache",
    "formula": "the formula",
}


def in_python(option: Option) -> str:
    """An Option in Python: name="flash", window=16."""
    if option.name in PHRASES:
        return PHRASES[option.name]
    name, value = option.name.rpartition(".")[2], option.value
    return f"{'name' if name == 'attention' else name}=" + (f'"{value}"' if isinstance(value, str) else repr(value))


def listed(names: list[str]) -> tuple[str, list[Option]]:
    """ "a, b or c" of implementations for an AttentionError: its template, then its parts."""
    template = " or ".join(filter(None, [", ".join(["{}"] * (len(names) - 1)), "{}"]))
    return template, [Option("attention", name) for name in names]
