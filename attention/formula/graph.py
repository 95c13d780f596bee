"""The graph of a formula: every expression is one `Node`, and equal expressions are the same node.

    s        the scaled score, a real number                i, j     positions of the query and the key, whole numbers
    h, b     numbers of the query head and the sequence     n        how many keys the query sees

Whole numbers (positions, and integer arithmetic on them) can be indices; real numbers are computed in fp32.
The functions of operations.py make the nodes that an expression consists of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

LEAVES = ("s", "i", "j", "h", "b", "n")
LARGEST = 1e30  # constant: fp32 holds it
Number = int | float


class Mistake(Exception):
    """A mistake in an expression, as a sentence without its end. `parse` and `trace` add the place."""


class Node:
    """An expression, made by functions of this package alone.

    op     a name of OPERATIONS, or "number", "leaf", "load" (an entry of a tensor) or "hoisted" (plan.py)
    args   nodes; for a load its indices
    value  of a number; the name of a leaf or tensor; the exponent of a power
    kind   "real", "whole" or "truth"
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
    """The node of these parts, as it stands: nothing is simplified. deps are those beyond the arguments'."""
    key = (op, args, value, kind)
    node = _NODES.get(key)
    if node is None:
        node = Node()
        node.op, node.args, node.value, node.kind = op, args, value, kind
        node.deps = frozenset(deps).union(*(x.deps for x in args))
        _NODES[key] = node
    return node


def number(x: Number) -> Node:
    """A constant: whole for an int, real for a float."""
    if not math.isfinite(x) or abs(x) > LARGEST or (isinstance(x, int) and abs(x) >= 2**31):
        raise Mistake("a constant is too large: whole numbers stay below 2^31, others below 1e30")
    return make("number", value=x, kind="whole" if isinstance(x, int) else "real")


def truth(x: bool) -> Node:
    """A comparison whose result is known."""
    return make("number", value=x, kind="truth")


def leaf(name: str) -> Node:
    """s, i, j, h, b or n."""
    return make("leaf", value=name, kind="real" if name == "s" else "whole", deps=[name])


def as_node(x: Any) -> Node:
    """A node as it is, a number as a constant."""
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
    """Two numbers of one kind: a whole one beside a real one becomes real."""
    x, y = as_node(a), as_node(b)
    if "truth" in (x.kind, y.kind) or x.kind != y.kind:
        x, y = real(x), real(y)
    return x, y


def fold(function: Callable[..., Number], *args: Node) -> Node | None:
    """The function of constants; None where an argument is none."""
    if not all(is_number(x) for x in args):
        return None
    try:
        return number(function(*(x.value for x in args)))
    except (ArithmeticError, ValueError):
        raise Mistake("a constant is not finite") from None


def topological(outputs: Iterable[Node]) -> list[Node]:
    """All nodes that `outputs` are made of, arguments first."""
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
