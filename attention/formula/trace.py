"""A Python function as a formula: the function is called once, with objects that record all operations on them.

>>> def score(s, i, j, h, slope):
...     return where(i - j < 64, s, s - slope[h] * (i - j))

Arguments named s, i, j, h, b and n have their meaning in formulas, and all others are tensors.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import FormulaError, Option
from . import operations as ops
from .graph import LEAVES, Mistake, Node, as_node, leaf
from .parse import CALLS, TAKEN, finished, show


class Traced:
    """An expression in the making."""

    __slots__ = ("node",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        self.node = node

    def __bool__(self) -> bool:
        raise Mistake("it cannot branch with if, and, or, not; write where(condition, a, b), &, | and ~")


def of(x: Any) -> Node:
    return x.node if isinstance(x, Traced) else as_node(x)


def called(name: str, *args: Any) -> Traced:
    """A function of formulas, called with traced expressions and numbers."""
    return Traced(ops.MAKERS[name](*map(of, args)))


def _operator(function: Callable[..., Node], swapped: bool = False) -> Callable[..., Traced]:
    def method(self: Traced, *others: Any) -> Traced:
        nodes = [self.node, *map(of, others)]
        return Traced(function(*(nodes[::-1] if swapped else nodes)))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "and", "or"):
    _function = ops.MAKERS["div" if _name == "truediv" else _name]
    setattr(Traced, f"__{_name}__", _operator(_function))
    setattr(Traced, f"__r{_name}__", _operator(_function, swapped=True))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _operator(partial(ops.compare, _name)))
for _name, _same in {"neg": "neg", "invert": "not", "abs": "abs"}.items():
    setattr(Traced, f"__{_name}__", _operator(ops.MAKERS[_same]))


class Tensor:
    """A tensor of a formula in the making. An index gives an entry; that of a tensor without dimensions is ()."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: Any) -> Traced:
        return Traced(ops.load(self.name, *map(of, index if isinstance(index, tuple) else (index,))))


def trace(function: Callable) -> str:
    """The text of the formula that a function computes. Raises FormulaError."""
    arguments = {}
    for name in inspect.signature(function).parameters:
        if name in TAKEN or name in CALLS or name.startswith("_"):
            raise FormulaError(f"{{}} cannot call a tensor {name}.", Option("formula"))
        arguments[name] = Traced(leaf(name)) if name in LEAVES else Tensor(name)
    try:
        return show(finished(of(function(**arguments))))
    except (Mistake, TypeError) as mistake:  # torch's functions and Python's math take no expressions
        raise FormulaError(
            "{} cannot be computed, as {}; its functions are those of attention.formula.", Option("formula"), mistake
        ) from None
