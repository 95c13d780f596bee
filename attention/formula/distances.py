"""Distances that a formula writes apart: t i - t j is t (i - j), for a number t of a head that is read from a tensor.

Apart, i and j would be numbers of rows and of columns, and the gradient of t the sum of the columns' gradients times j.
Each row's gradients sum to zero, but only up to rounding, which that sum multiplies by the position.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from . import operations as ops
from .graph import Node, is_number, leaf, number, topological


class Product(NamedTuple):
    """The product of a number, of numbers that are the same for a head, and of a whole number."""

    times: float
    heads: tuple[Node, ...]
    whole: Node


def joined(x: Node) -> Node:
    """x with its distances whole."""
    change: dict[Node, Node] = {}
    for y in topological([x]):
        args = tuple(change[z] for z in y.args)
        y_new = y if args == y.args else ops.combine(y, args)
        change[y] = join_terms(y_new) if y_new.op in ("add", "sub") and y_new.kind == "real" else y_new
    return change[x]


def join_terms(x: Node) -> Node:
    """A sum with the distances among its terms whole."""
    rest: list[Node] = []
    groups: dict[tuple[float | Node, ...], list[tuple[Node, Product]]] = {}
    for term in terms(x):
        p = product(term)
        if p is None:
            rest.append(term)
        else:
            groups.setdefault((abs(p.times), *sorted(p.heads, key=id)), []).append((term, p))
    found = [group for group in groups.values() if is_apart([p for _, p in group])]
    if not found:
        return x
    rest += [term for group in groups.values() if group not in found for term, _ in group]
    result = reduce(ops.add, rest, number(0.0))
    for group in found:
        times, heads, _ = group[0][1]
        factor = ops.multiply(abs(times), reduce(ops.multiply, heads))
        whole = signed_sum([p for _, p in group])
        negative = ops.linear(whole)[0][leaf("i")] < 0
        term = ops.multiply(factor, ops.negate(whole) if negative else whole)
        result = ops.subtract(result, term) if negative else ops.add(result, term)
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


def product(x: Node) -> Product | None:
    """x as a Product with a tensor's number in it; None where it is none."""
    times, heads, wholes, waiting = 1.0, [], [], [x]
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
            wholes.append(y.args[0])
        else:
            heads.append(y)
    reads = any(y.op == "load" for y in topological(heads))
    if not reads or len(wholes) != 1 or any(y.deps & {"s", "i", "j", "n"} for y in heads):
        return None
    return Product(times, tuple(heads), wholes[0])


def signed_sum(products: list[Product]) -> Node:
    """The sum of the whole numbers, of which those of negative products count negatively."""
    return reduce(ops.add, (ops.negate(p.whole) if p.times < 0 else p.whole for p in products))


def is_apart(products: list[Product]) -> bool:
    """Whether i and j stand in the sum as a distance, but not in each of the products."""
    return is_distance(signed_sum(products)) and not all(is_distance(p.whole) for p in products)


def is_distance(whole: Node) -> bool:
    """Whether a whole number has i - j as a term, and i and j in no other."""
    found = ops.linear(whole)[0]
    return leaf("i") in found and found.get(leaf("j")) == -found[leaf("i")]
