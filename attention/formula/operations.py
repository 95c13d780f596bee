"""Arithmetic on the nodes of a formula.

Constants are folded, a constant factor comes first, and sums of integers have one normal form, so that i - j is the
same node however it is written. Otherwise an expression is evaluated as it was written.
"""

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from .graph import (
    Mistake,
    Node,
    Number,
    Operand,
    as_node,
    fold,
    is_number,
    leaf,
    make,
    matched,
    number,
    real,
    topological,
    truth,
)

LARGEST_POWER = 8


def load(name: str, *index: Operand) -> Node:
    """An entry of the tensor `name`, at integer indices."""
    nodes = tuple(map(as_node, index))
    for x in nodes:
        if x.kind != "whole":
            raise Mistake(f"an index of {name} must be a whole number; floor(x) makes one of x")
        if "s" in x.deps:
            raise Mistake(f"an index of {name} cannot depend on s")
        if "b" in x.deps and x is not leaf("b"):
            raise Mistake(f"b is an index by itself, as in {name}[b, i]")
    return make("load", nodes, name)


def linear(x: Node) -> tuple[dict[Node, int], int]:
    """An integer expression as a sum: the coefficient of each term that is not a sum itself, and the constant."""
    if x.op == "number":
        return {}, x.value
    if x.op in ("add", "sub"):
        terms, constant = linear(x.args[0])
        sign = 1 if x.op == "add" else -1
        others, other = linear(x.args[1])
        for term, times in others.items():
            terms[term] = terms.get(term, 0) + sign * times
        return {term: times for term, times in terms.items() if times}, constant + sign * other
    if x.op == "neg" or (x.op == "mul" and is_number(x.args[0])):
        by = -1 if x.op == "neg" else x.args[0].value
        terms, constant = linear(x.args[-1])
        return {term: by * times for term, times in terms.items()}, by * constant
    return {x: 1}, 0


def from_linear(terms: dict[Node, int], constant: int) -> Node:
    """The integer with these terms, the inverse of `linear`. i and j with opposite coefficients become i - j."""
    i, j = leaf("i"), leaf("j")
    if terms.get(i) and terms.get(j) == -terms[i]:
        distance = make("sub", (i, j) if terms[i] > 0 else (j, i), kind="whole")
        terms = {distance: abs(terms[i]), **{x: times for x, times in terms.items() if x not in (i, j)}}
    parts = [
        (times, x if abs(times) == 1 else make("mul", (number(abs(times)), x), kind="whole"))
        for x, times in terms.items()
        if times
    ]
    added, taken = [x for times, x in parts if times > 0], [x for times, x in parts if times < 0]
    if constant > 0 or not parts:
        added.append(number(constant))
    elif constant < 0:
        taken.append(number(-constant))
    result = added.pop(0) if added else make("neg", (taken.pop(0),), kind="whole")
    for x in added:
        result = make("add", (result, x), kind="whole")
    for x in taken:
        result = make("sub", (result, x), kind="whole")
    return result


def add(a: Operand, b: Operand) -> Node:
    x, y = matched(a, b)
    if x.kind == "whole":
        terms, constant = linear(x)
        others, other = linear(y)
        return from_linear({t: terms.get(t, 0) + others.get(t, 0) for t in terms | others}, constant + other)
    if (folded := fold(operator.add, x, y)) is not None:
        return folded
    if is_number(x, 0):
        return y
    if is_number(y, 0):
        return x
    return make("sub", (x, y.args[0])) if y.op == "neg" else make("add", (x, y))


def subtract(a: Operand, b: Operand) -> Node:
    x, y = matched(a, b)
    if x.kind == "whole":
        return add(x, negate(y))
    if (folded := fold(operator.sub, x, y)) is not None:
        return folded
    if is_number(y, 0):
        return x
    if is_number(x, 0):
        return negate(y)
    if x is y:
        return number(0.0)
    return make("add", (x, y.args[0])) if y.op == "neg" else make("sub", (x, y))


def negate(a: Operand) -> Node:
    x = as_node(a)
    if x.kind == "whole":
        terms, constant = linear(x)
        return from_linear({term: -times for term, times in terms.items()}, -constant)
    x = real(x)
    if (folded := fold(operator.neg, x)) is not None:
        return folded
    if x.op == "real":
        return real(negate(x.args[0]))
    if x.op == "neg":
        return x.args[0]
    if x.op == "mul" and is_number(x.args[0]):
        return multiply(-x.args[0].value, x.args[1])
    return make("neg", (x,))


def multiply(a: Operand, b: Operand) -> Node:
    """A constant factor comes first. A product of two integers that vary is real, because it could overflow 32 bits."""
    x, y = as_node(a), as_node(b)
    if y.op == "number":
        x, y = y, x
    if x.kind == y.kind == "whole" and x.op == "number":
        terms, constant = linear(y)
        return from_linear({term: x.value * times for term, times in terms.items()}, x.value * constant)
    x, y = real(x), real(y)
    if (folded := fold(operator.mul, x, y)) is not None:
        return folded
    if x.op == "number":
        if x.value in (0, 1, -1):
            return number(0.0) if x.value == 0 else y if x.value == 1 else negate(y)
        if y.op == "neg":
            return multiply(-x.value, y.args[0])
        if y.op == "mul" and is_number(y.args[0]):
            return multiply(x.value * y.args[0].value, y.args[1])
        return make("mul", (x, y))
    for one, other in ((x, y), (y, x)):
        if one.op == "neg":
            return negate(multiply(one.args[0], other))
    for one, other in ((x, y), (y, x)):
        if one.op == "mul" and is_number(one.args[0]):
            return multiply(one.args[0].value, multiply(one.args[1], other))
    return make("mul", (x, y))


def divide(a: Operand, b: Operand) -> Node:
    x, y = real(as_node(a)), real(as_node(b))
    if is_number(y, 0):
        raise Mistake("it divides by zero")
    if (folded := fold(operator.truediv, x, y)) is not None:
        return folded
    if is_number(x, 0) or is_number(y, 1):
        return x
    if x.op == "neg":
        return negate(divide(x.args[0], y))
    if x is y:
        return number(1.0)
    if y.op == "number" and x.op == "mul" and is_number(x.args[0]):
        return multiply(x.args[0].value / y.value, x.args[1])
    return make("div", (x, y))


def power(a: Operand, b: Operand) -> Node:
    """x ** n by multiplication for an integer n, otherwise exp(y log x)."""
    x, y = real(as_node(a)), as_node(b)
    if y.op == "number" and float(y.value).is_integer():
        n = int(y.value)
        if abs(n) > LARGEST_POWER:
            raise Mistake(f"a whole exponent lies between -{LARGEST_POWER} and {LARGEST_POWER}")
        if n < 0:
            return divide(1.0, power(x, -n))
        if (folded := fold(lambda p: p**n, x)) is not None:
            return folded
        return number(1.0) if n == 0 else x if n == 1 else make("pow", (x,), n)
    y = real(y)
    if is_number(y, 0.5):
        return unary("sqrt", x)
    if (folded := fold(math.pow, x, y)) is not None:
        return folded
    return unary("exp", multiply(y, unary("log", x)))


def whole_division(op: str, a: Operand, b: Operand) -> Node:
    """Floor division ("floordiv") or its remainder ("mod"), as in Python."""
    x, y = as_node(a), as_node(b)
    if x.kind != "whole" or y.kind != "whole" or y.op != "number" or y.value < 1:
        raise Mistake("// and % take a whole number and a positive whole constant, as in i // 64")
    if (folded := fold(getattr(operator, op), x, y)) is not None:
        return folded
    if y.value == 1:
        return x if op == "floordiv" else number(0)
    return make(op, (x, y), kind="whole")


def extreme(op: str, a: Operand, b: Operand) -> Node:
    """The smaller ("min") or the larger ("max") of two numbers."""
    x, y = matched(a, b)
    if (folded := fold(min if op == "min" else max, x, y)) is not None:
        return folded
    return x if x is y else make(op, (x, y), kind=x.kind)


COMPARISONS: dict[str, Callable[[Number, Number], bool]] = {
    op: getattr(operator, op) for op in ("lt", "le", "eq", "ne")
}


def compare(op: str, a: Operand, b: Operand) -> Node:
    """Whether a < b ("lt"), a <= b ("le"), a == b ("eq"), a != b ("ne"), a > b ("gt") or a >= b ("ge")."""
    if op in ("gt", "ge"):
        op, a, b = {"gt": "lt", "ge": "le"}[op], b, a
    x, y = matched(a, b)
    if is_number(x) and is_number(y):
        return truth(COMPARISONS[op](x.value, y.value))
    return make(op, (x, y), kind="truth")


def both(op: str, a: Node, b: Node) -> Node:
    """Whether both ("and") or one of ("or") two comparisons hold."""
    for x, other in ((a, b), (b, a)):
        condition(x)
        if x.op == "number":
            return other if x.value is (op == "and") else x
    return a if a is b else make(op, (a, b), kind="truth")


def invert(a: Node) -> Node:
    """Whether a comparison does not hold."""
    condition(a)
    if a.op == "number":
        return truth(not a.value)
    return a.args[0] if a.op == "not" else make("not", (a,), kind="truth")


def condition(x: Any) -> None:
    """Raise Mistake unless x is a comparison."""
    if not isinstance(x, Node) or x.kind != "truth":
        raise Mistake("a condition is a comparison, as in i - j < 8")


def where(test: Node, a: Operand, b: Operand) -> Node:
    """a where a comparison holds, else b."""
    condition(test)
    x, y = matched(a, b)
    if test.op == "number":
        return x if test.value else y
    return x if x is y else make("where", (test, x, y), kind=x.kind)


FUNCTIONS: dict[str, Callable[[float], Number]] = {
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sin": math.sin,
    "cos": math.cos,
    "abs": abs,
    "floor": math.floor,
}


def unary(op: str, a: Operand) -> Node:
    """A function of FUNCTIONS of a real number. abs also takes integers, and floor(x) is an integer."""
    x = as_node(a)
    if op == "floor" and x.kind == "whole":
        return x
    if op != "abs":
        x = real(x)
    if (folded := fold(FUNCTIONS[op], x)) is not None:
        return folded
    return make(op, (x,), kind="whole" if op == "floor" or x.kind == "whole" else "real")


# The function that makes the node of an operation, by the operation's name.
MAKERS: dict[str, Callable[..., Node]] = {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "div": divide,
    "pow": power,
    "neg": negate,
    "not": invert,
    "where": where,
    "real": real,
    **{
        name: partial(function, name)
        for function, names in (
            (unary, FUNCTIONS),
            (compare, COMPARISONS),
            (both, ("and", "or")),
            (extreme, ("min", "max")),
            (whole_division, ("floordiv", "mod")),
        )
        for name in names
    },
}


def rebuild(x: Node, change: dict[Node, Node]) -> Node:
    """x with nodes replaced by `change`, and simplified again. `change` grows by all nodes of x."""
    for y in topological([x]):
        if y not in change:
            args = tuple(change[z] for z in y.args)
            change[y] = y if args == y.args else combine(y, args)
    return change[x]


def combine(x: Node, args: tuple[Node, ...]) -> Node:
    """The operation of x with other arguments."""
    match x.op:
        case "load":
            return load(x.value, *args)
        case "pow":
            return power(args[0], x.value)
    return MAKERS[x.op](*args)
