"""Derivatives of a formula by reverse mode on its graph, so that they share intermediate results with the value."""

from collections.abc import Sequence

from . import operations as ops
from .graph import Node, Operand, as_node, is_number, number, topological


def derivatives(output: Node, inputs: Sequence[Node]) -> list[Node]:
    """d output / d each of `inputs`: leaves, loads or placeholders of them. floor and comparisons have no derivative.

    At a corner of max or min the first argument's derivative counts; at that of abs it is 0.
    """
    total = {output: number(1.0)}
    for x in reversed(topological([output])):
        if x in total and x.kind == "real":
            for y, term in zip(x.args, pulled_back(total[x], x), strict=False):
                if y.kind == "real" and y.op != "number":
                    total[y] = added(total[y], term) if y in total else term
    return [total.get(x, number(0.0)) for x in inputs]


def added(a: Node, b: Node) -> Node:
    """a + b. Where both choose by the same condition, the sum is inside of the choice."""
    if a.op == b.op == "where" and a.args[0] is b.args[0]:
        return ops.where(a.args[0], added(a.args[1], b.args[1]), added(a.args[2], b.args[2]))
    return ops.add(a, b)


def product(g: Node, factor: Node) -> Node:
    """g times a factor. Where g chooses between 0 and 1, the product is inside of the choice."""
    if g.op == "where" and all(is_number(x) and x.value in (0, 1) for x in g.args[1:]):
        return ops.where(g.args[0], *(ops.multiply(x, factor) for x in g.args[1:]))
    return ops.multiply(g, factor)


def pulled_back(g: Node, x: Node) -> list[Node]:
    """g times the derivative of an operation by each of its arguments."""
    a = x.args

    def times(*factors: Operand) -> list[Node]:
        return [product(g, as_node(factor)) for factor in factors]

    match x.op:
        case "add":
            return [g, g]
        case "sub":
            return [g, ops.negate(g)]
        case "neg":
            return [ops.negate(g)]
        case "mul":
            return times(a[1], a[0])
        case "div":
            return [ops.divide(g, a[1]), ops.negate(ops.divide(ops.multiply(g, x), a[1]))]
        case "pow":
            return times(ops.multiply(float(x.value), ops.power(a[0], x.value - 1)))
        case "exp":
            return times(x)
        case "log":
            return [ops.divide(g, a[0])]
        case "sqrt":
            return [ops.divide(ops.multiply(0.5, g), x)]
        case "tanh":
            return times(ops.subtract(1.0, ops.power(x, 2)))
        case "sigmoid":
            return times(ops.multiply(x, ops.subtract(1.0, x)))
        case "sin":
            return times(ops.unary("cos", a[0]))
        case "cos":
            return times(ops.negate(ops.unary("sin", a[0])))
        case "abs":
            negative, zero = ops.compare("lt", a[0], 0.0), ops.compare("eq", a[0], 0.0)
            return times(ops.where(negative, -1.0, ops.where(zero, 0.0, 1.0)))
        case "min" | "max":
            first = ops.compare("le", *(a if x.op == "min" else a[::-1]))
            return [ops.where(first, g, 0.0), ops.where(first, 0.0, g)]
        case "where":
            return [number(0.0), ops.where(a[0], g, 0.0), ops.where(a[0], 0.0, g)]
    return [number(0.0)] * len(a)
