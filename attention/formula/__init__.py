"""Scores by formula: `Score(formula=...)`, as text or as a Python function that uses the functions of this module.

graph.py, operations.py     a formula as a graph, in which equal expressions are one node
parse.py, trace.py          graphs from text, by a white list, and from Python functions
derivative.py, ranges.py    derivatives; the range of every expression
plan.py, hoist.py           the parts that are computed once for a row, a column or a distance instead of for each score
evaluate.py, tile.py        formulas computed in torch
call.py, rules.py, axes.py  the positions of a call; the shapes of its tensors; mistakes in a formula
describe.py                 the parts that change nothing
"""

from functools import partial

from .trace import called

exp, log, sqrt, tanh, sigmoid, sin, cos, floor, minimum, maximum, where = (
    partial(called, name)
    for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "floor", "min", "max", "where")
)

__all__ = ["cos", "exp", "floor", "log", "maximum", "minimum", "sigmoid", "sin", "sqrt", "tanh", "where"]
