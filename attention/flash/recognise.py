"""Formulas that the kernels have faster ways for: a soft cap, ALiBi, and ALiBi after a soft cap."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..formula.graph import Node, is_number, leaf, make
from ..formula.parse import parse
from ..gpu import constant_when_compiled
from ..score import Score


class Recognised(NamedTuple):
    """A formula as the kernels' options, and the tensor that has ALiBi's slopes."""

    soft_cap: float | None
    slopes: str | None


def soft_cap_of(x: Node) -> float | None:
    """c of c tanh(s / c); None for anything else."""
    if x.op != "mul" or not is_number(x.args[0]) or x.args[1].op != "tanh":
        return None
    cap, s = x.args[0].value, x.args[1].args[0]
    by_number = s.op == "div" and s.args[0] is leaf("s") and is_number(s.args[1], cap)
    return float(cap) if by_number and cap > 0 else None


def slopes_of(x: Node) -> str | None:
    """The tensor of tensor[h] (i - j); None for anything else."""
    distance = make("real", (make("sub", (leaf("i"), leaf("j")), kind="whole"),))
    for one, other in (x.args, x.args[::-1]) if x.op == "mul" else ():
        if one.op == "load" and one.args == (leaf("h"),) and other is distance:
            return str(one.value)
    return None


@constant_when_compiled
def recognised(text: str) -> Recognised | None:
    """The options whose formula this is; None where there are none."""
    x, slopes = parse(text), None
    if x.op == "sub" and (slopes := slopes_of(x.args[1])) is not None:
        x = x.args[0]
    cap = soft_cap_of(x)
    if (cap is None and x is not leaf("s")) or (cap is None and slopes is None):
        return None
    return Recognised(cap, slopes)


def with_options(score: Score) -> Score:
    """A score whose formula the kernels recognise with their options instead; others as they are."""
    if score.formula is None:
        return score
    return as_options(str(score.formula), score.causal, score.window, score.sinks) or score


@constant_when_compiled
def as_options(formula: str, causal: bool, window: int | None, sinks: bool) -> Score | None:
    """A score by formula, given by its fields, as the kernels' options; None where the kernels compute the formula.

    A factor of s alone is multiplied into the queries and leaves the kernels nothing to do. The compiler of torch 2.11
    can pass no Score to a constant function, nor call a method of one that such a function returns.
    """
    score = Score(causal, window, sinks=sinks, formula=formula)
    found, steps = recognised(formula), score.steps()
    if steps is not None and steps.is_identity:
        return replace(score, formula=None)
    if found is None or (found.slopes is not None and not causal):
        return None
    return replace(score, formula=None, soft_cap=found.soft_cap, alibi=found.slopes is not None)
