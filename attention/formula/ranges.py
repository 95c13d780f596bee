"""The range of every expression by interval arithmetic, from the positions of queries and keys."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .graph import Node, leaf, topological
from .operations import linear

INF = math.inf
Interval = tuple[float, float]  # the lowest and the highest value


class Reach(NamedTuple):
    """The positions of a call's queries and keys.

    queries, keys  the lowest and the highest position
    causal         whether queries see no keys at later positions
    window         the number of keys that a query sees; None: all
    heads          the number of query heads; infinity where it is not known
    """

    queries: Interval = (0, INF)
    keys: Interval = (0, INF)
    causal: bool = True
    window: int | None = None
    heads: float = INF

    def distance(self) -> Interval:
        """The range of i - j, for a query that sees a key."""
        low, high = self.queries[0] - self.keys[1], self.queries[1] - self.keys[0]
        if self.causal:
            low, high = max(low, 0), max(high, 0)
        return low, high if self.window is None else min(high, self.window - 1)

    def leaf(self, name: str) -> Interval:
        """The range of a leaf."""
        most = self.keys[1] - self.keys[0] + 1
        if name == "n" and self.window is not None:
            most = min(most, self.window)
        return {
            "s": (-INF, INF),
            "i": (max(self.queries[0], 0), max(self.queries[1], 0)),
            "j": self.keys,
            "h": (0, self.heads - 1),
            "b": (0, INF),
            "n": (1, max(most, 1)),
        }[name]


def intervals(outputs: Sequence[Node], reach: Reach) -> dict[Node, Interval]:
    """The ranges of all numbers in `outputs`, for queries and keys that see each other. Loads have any value."""
    ranges: dict[Node, Interval] = {}
    for x in topological(outputs):
        if x.kind == "truth":
            continue
        if x.kind == "whole" and x.op in ("add", "sub", "neg", "mul"):
            ranges[x] = of_sum(x, ranges, reach)
        elif x.op == "leaf":
            ranges[x] = reach.leaf(x.value)
        else:
            ranges[x] = of_operation(x, [ranges.get(y, (0, 1)) for y in x.args], reach)
    return ranges


def of_sum(x: Node, ranges: dict[Node, Interval], reach: Reach) -> Interval:
    """The range of an integer sum in which i and j vary together: j = i - d for a distance d."""
    terms, constant = linear(x)
    i, j = terms.pop(leaf("i"), 0), terms.pop(leaf("j"), 0)
    rest = [scaled(ranges[term], times) for term, times in terms.items()]
    queries, keys, distance = reach.leaf("i"), reach.leaf("j"), reach.distance()
    ways = [
        added(scaled(queries, i), scaled(keys, j)),
        added(scaled(keys, i + j), scaled(distance, i)),
        added(scaled(queries, i + j), scaled(distance, -j)),
    ]
    pair = max(low for low, _ in ways), min(high for _, high in ways)
    return added(pair, *rest, (constant, constant))


def added(*terms: Interval) -> Interval:
    return sum(low for low, _ in terms), sum(high for _, high in terms)


def scaled(x: Interval, times: float) -> Interval:
    return products(x, (times, times))


def products(x: Interval, y: Interval) -> Interval:
    corners = [0.0 if 0 in (p, q) else p * q for p in x for q in y]
    return min(corners), max(corners)


def monotone(function: Callable[[float], float], lowest: float, highest: float) -> Callable[[Interval], Interval]:
    """An increasing function of an interval; where Python's floats overflow, it is `lowest` or `highest`."""

    def value(x: float, instead: float) -> float:
        try:
            return function(x)
        except (ValueError, OverflowError):
            return instead

    return lambda x: (value(x[0], lowest), value(x[1], highest))


def magnitude(x: Interval) -> Interval:
    low = 0.0 if x[0] <= 0 <= x[1] else min(map(abs, x))
    return low, max(map(abs, x))


INCREASING: dict[str, Callable[[Interval], Interval]] = {
    "exp": monotone(math.exp, 0.0, INF),
    "log": monotone(lambda x: math.log(x) if x < INF else INF, -INF, INF),
    "sqrt": monotone(lambda x: math.sqrt(x) if x < INF else INF, 0.0, INF),
    "tanh": monotone(math.tanh, -1.0, 1.0),
    "sigmoid": lambda x: (0.0, 1.0),
    "sin": lambda x: (-1.0, 1.0),
    "cos": lambda x: (-1.0, 1.0),
    "floor": monotone(lambda x: math.floor(x) if abs(x) < INF else x, -INF, INF),
    "abs": magnitude,
    "real": lambda x: x,
    "neg": lambda x: (-x[1], -x[0]),
}


def of_operation(x: Node, a: list[Interval], reach: Reach) -> Interval:
    if x.op in INCREASING:
        return INCREASING[x.op](a[0])
    match x.op:
        case "number":
            return x.value, x.value
        case "add":
            return added(*a)
        case "sub":
            return a[0][0] - a[1][1], a[0][1] - a[1][0]
        case "mul":
            return products(*a) if x.args[0] is not x.args[1] else magnitude(products(*a))
        case "div":
            low, high = a[1]
            if low <= 0 <= high:
                return -INF, INF
            return products(a[0], (1 / high, 1 / low))
        case "pow":
            low, high = (y**x.value for y in (magnitude(a[0]) if x.value % 2 == 0 else a[0]))
            return low, high
        case "floordiv":
            return tuple(y // x.args[1].value if abs(y) < INF else y for y in a[0])  # type: ignore[return-value]
        case "mod":
            return 0, x.args[1].value - 1
        case "min":
            return min(a[0][0], a[1][0]), min(a[0][1], a[1][1])
        case "max":
            return max(a[0][0], a[1][0]), max(a[0][1], a[1][1])
        case "where":
            return min(a[1][0], a[2][0]), max(a[1][1], a[2][1])
        case "hoisted":
            return intervals([x.value], reach)[x.value]
    return -INF, INF  # a load
