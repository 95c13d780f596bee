"""The graph of a formula: every expression is one `Node`, and equal expressions are the same node.

    s     the scaled score, a real number                    i, j  the positions of query and key, integers
    h, b  the numbers of the query head and the sequence     n     the number of keys that the query sees

Integers (positions, and integer arithmetic on them) can be indices; real numbers are computed in fp32. The functions of
operations.py make nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

LEAVES = ("s", "i", "j", "h", "b", "n")
LARGEST = 1e30  # of a constant; fp32 can represent it
Number = int | float


class Mistake(Exception):
    """A mistake in an expression, as the end of a sentence. `parse` and `trace` add the place."""


class Node:
    """An expression. Only the functions of this package make nodes.

    op     a name of OPERATIONS, or "number", "leaf", "load" (an entry of a tensor) or "hoisted" (plan.py)
    args   nodes; for a load its indices
    value  the value of a number; the name of a leaf or tensor; the exponent of a power
    kind   "real", "whole" (an integer) or "truth"
    deps   the leaves on which it depends
    """

    __slots__ = ("__weakref__", "args", "deps", "kind", "op", "value")

    op: str
    args: tuple[Node, ...]
    value: Any
    kind: str
    deps: frozenset[str]


Operand = Node | int | float
_NODES: WeakValueDictionary[tuple, Node] = WeakValueDictionary()


def make(op: str, args: tuple[Node, ...] = (), value: Any = None, kind: str = "real", deps: Iterable[str] = ()) -> Node:
    """The node with these parts, without simplification. deps are in addition to those of the arguments."""
    key = (op, args, value, kind)
    node = _NODES.get(key)
    if node is None:
        node = Node()
        node.op, node.args, node.value, node.kind = op, args, value, kind
        node.deps = frozenset(deps).union(*(x.deps for x in args))
        _NODES[key] = node
    return node


def number(x: Number) -> Node:
    """A constant: an integer for an int, real for a float."""
    if not math.isfinite(x) or abs(x) > LARGEST or (isinstance(x, int) and abs(x) >= 2**31):
        raise Mistake("a constant is too large: whole numbers stay below 2^31, others below 1e30")
    return make("number", value=x, kind="whole" if isinstance(x, int) else "real")


def truth(x: bool) -> Node:
    """A comparison with a known result."""
    return make("number", value=x, kind="truth")


def leaf(name: str) -> Node:
    """s, i, j, h, b or n."""
    return make("leaf", value=name, kind="real" if name == "s" else "whole", deps=[name])


def as_node(x: Any) -> Node:
    """A node unchanged, a Python number as a constant."""
    if isinstance(x, Node):
        return x
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise Mistake(f"{x!r} is no number")
    return number(x)


def is_number(x: Node, value: Number | None = None) -> bool:
    """Whether x is a constant, and `value` if one is given."""
    return x.op == "number" and x.kind != "truth" and (value is None or x.value == value)


def real(x: Node) -> Node:
    """x as a real number."""
    if x.kind == "truth":
        raise Mistake("a comparison is no number; write where(condition, a, b)")
    if x.kind == "real":
        return x
    return number(float(x.value)) if x.op == "number" else make("real", (x,))


def matched(a: Operand, b: Operand) -> tuple[Node, Node]:
    """Two operands of one kind: an integer becomes real if the other is real."""
    x, y = as_node(a), as_node(b)
    if "truth" in (x.kind, y.kind) or x.kind != y.kind:
        x, y = real(x), real(y)
    return x, y


def fold(function: Callable[..., Number], *args: Node) -> Node | None:
    """The function's value for constants; None where an argument is not constant."""
    if not all(is_number(x) for x in args):
        return None
    try:
        return number(function(*(x.value for x in args)))
    except (ArithmeticError, ValueError):
        raise Mistake("a constant is not finite") from None


def topological(outputs: Iterable[Node]) -> list[Node]:
    """All nodes of the graph of `outputs`, arguments before the nodes that use them."""
    done: dict[Node, None] = {}
    stack = list(outputs)[::-1]
    while stack:
        x = stack[-1]
        waiting = [y for y in reversed(x.args) if y not in done]
        if waiting and x not in done:
            stack += waiting
            continue
        done[stack.pop()] = None
    return list(done)
