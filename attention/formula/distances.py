"""Distances that a formula writes apart: t i - t j is t (i - j), for a number t of a head that is read from a tensor.

Apart, i and j would be numbers of rows and of columns, and the gradient of t the sum of the columns' gradients times j.
Each row's gradients sum to zero, but only up to rounding, which that sum multiplies by the position.
"""

from __future__ import annotations

from functools import reduce

from . import operations as ops
from .graph import Node, is_number, leaf, number, topological
from .parse import show


def joined(x: Node) -> Node:
    """x with its distances whole."""
    return ops.rebuild(x, {}, join_terms)


def join_terms(x: Node) -> Node:
    """A real sum with the distances among its terms whole; other nodes as they are."""
    if x.op not in ("add", "sub") or x.kind != "real":
        return x
    rest: list[Node] = []
    groups: dict[Node, list[tuple[Node, Node]]] = {}  # a factor -> its terms, and their integers
    for term in terms(x):
        if (found := product(term)) is None:
            rest.append(term)
        else:
            groups.setdefault(found[0], []).append((term, found[1]))
    distances: dict[Node, Node] = {}
    for factor, group in groups.items():
        integer = reduce(ops.add, (y for _, y in group))
        if is_distance(integer) and not all(is_distance(y) for _, y in group):
            distances[factor] = integer
        else:
            rest += (term for term, _ in group)
    if not distances:
        return x
    result = reduce(ops.add, rest, number(0.0))
    for factor, integer in distances.items():
        if ops.linear(integer)[0][leaf("i")] < 0:
            result = ops.subtract(result, ops.multiply(factor, ops.negate(integer)))
        else:
            result = ops.add(result, ops.multiply(factor, integer))
    return result


def terms(x: Node) -> list[Node]:
    """Terms whose sum is x."""
    match x.op:
        case "add":
            return terms(x.args[0]) + terms(x.args[1])
        case "sub":
            return terms(x.args[0]) + [ops.negate(y) for y in terms(x.args[1])]
        case "neg":
            return [ops.negate(y) for y in terms(x.args[0])]
    return [x]


def product(x: Node) -> tuple[Node, Node] | None:
    """(a number of a head, read from tensors, an integer) whose product is x; None where there are none."""
    times, heads, integers, waiting = 1.0, [], [], [x]
    while waiting:
        y = waiting.pop()
        if y.op == "mul":
            waiting += y.args
        elif y.op == "neg" or (y.op == "div" and is_number(y.args[1])):
            times = -times if y.op == "neg" else times / y.args[1].value
            waiting.append(y.args[0])
        elif is_number(y):
            times *= y.value
        elif y.op == "real":
            integers.append(y.args[0])
        else:
            heads.append(y)
    reads = any(y.op == "load" for y in topological(heads))
    if not reads or len(integers) != 1 or any(y.deps & {"s", "i", "j", "n"} for y in heads):
        return None
    factor = ops.multiply(abs(times), reduce(ops.multiply, sorted(heads, key=show)))
    return factor, ops.negate(integers[0]) if times < 0 else integers[0]


def is_distance(integer: Node) -> bool:
    """Whether an integer has i - j as a term, and i and j in no other."""
    found = ops.linear(integer)[0]
    return leaf("i") in found and found.get(leaf("j")) == -found[leaf("i")]
