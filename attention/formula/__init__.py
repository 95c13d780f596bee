"""Scores by formula: `Score(formula=...)`, as text or as a Python function that uses the functions of this module.

graph.py, operations.py    expressions as a graph in which equal ones are one node
parse.py, trace.py         from text, by a white list, and from a Python function
derivative.py, ranges.py   derivatives; the range of every expression
plan.py, hoist.py          parts that are computed once for a row, a column or a distance, and not for each score
evaluate.py, tile.py       in torch
call.py, check.py, axes.py    a call's positions; the shapes of tensors; mistakes
describe.py                in words
"""

from functools import partial

from .trace import called

exp, log, sqrt, tanh, sigmoid, sin, cos = (
    partial(called, name) for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos")
)
floor, minimum, maximum, where = (partial(called, name) for name in ("floor", "min", "max", "where"))

__all__ = ["cos", "exp", "floor", "log", "maximum", "minimum", "sigmoid", "sin", "sqrt", "tanh", "where"]
