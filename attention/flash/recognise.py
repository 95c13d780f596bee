"""Scores as the kernels compute them: by the options that they have code for, or by a formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..formula.distances import joined
from ..formula.graph import leaf
from ..formula.parse import parse
from ..gpu import constant_when_compiled
from ..score import Score
from ..scores import OPTIONS


class Options(NamedTuple):
    """A formula as options of a Score, and the formula's names of their tensors: pairs, as torch.compile takes them."""

    values: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, str], ...]


@constant_when_compiled
def recognised(text: str) -> Options | None:
    """The options whose formula this is; None where there are none."""
    values: dict[str, Any] = {}
    tensors: dict[str, str] = {}
    x = joined(parse(text))
    for option in reversed(OPTIONS):
        if (known := option.recognised(x)) is not None:
            x, values[option.name] = known.before, known.value
            tensors |= known.tensors
    return Options((*values.items(),), (*tensors.items(),)) if values and x is leaf("s") else None


def has_code(score: Score) -> bool:
    """Whether the kernels have code for all options of a score."""
    return score.formula is None and all(option.in_kernels for option, _ in score.options)


def with_options(score: Score) -> Score:
    """The same score for the kernels: with options in place of a formula that they recognise, and the other way round.

    A factor of s alone is multiplied into the queries and leaves the kernels nothing to do.
    """
    return score if has_code(score) else as_options(*score.values) or score


@constant_when_compiled
def as_options(*values: Any) -> Score | None:
    """`with_options` for a score's values; None where that is a formula which stays as it is.

    The compiler of torch 2.11 can pass no Score to a constant function, nor call a method of one that such a function
    returns.
    """
    score = Score(*values)
    found, steps = recognised(str(score.expression)), score.steps()
    off = {option.name: option.default for option in OPTIONS if option.is_formula}
    if steps is not None and steps.is_identity:
        return replace(score, formula=None, **off)
    known = {} if found is None else dict(found.values)
    looks_back = any(option.looks_back and option.name in known for option in OPTIONS)
    if known and (score.causal or not looks_back):
        return replace(score, formula=None, **(off | known))
    return None if score.formula is not None else replace(score, formula=score.expression, **off)
