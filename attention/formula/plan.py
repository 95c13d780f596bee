"""The plan of a formula: which parts are computed once a head, row, column or distance, and which for each score.

    formula = value(factor s, hoisted numbers, i, j)

A part that is the same for a head, along a row or column, or for all pairs of one distance i - j is hoisted: torch
computes it once, before any score. The implementation that computes the scores then reads vectors, and gives each its
gradient; autograd goes on from there to the caller's tensors. A factor of s that is the same along a row never reaches
an implementation: it multiplies the queries.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from typing import NamedTuple

from ..errors import FormulaError, Option
from . import operations as ops
from .derivative import derivatives
from .graph import Mistake, Node, is_number, leaf, make, number, real, topological
from .operations import rebuild
from .parse import parse
from .ranges import INF, Reach, intervals

FURTHEST = 2**20  # distance
COSTLY = {"exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "floor", "load"}
DEPS = {"head": (), "row": ("i",), "column": ("j",), "distance": ("i", "j"), "pair": ("i", "j")}


class Hoisted(NamedTuple):
    """A part that is computed beforehand, with or without a batch and with or without heads.

    node   the expression
    stage  "head": one number; "row" or "column": one for each query or key; "distance": one for each i - j;
           "pair": one for each query and key, an entry of a tensor that is given so
    far    distances from this on have the same number; None: there is no such distance
    """

    node: Node
    stage: str
    far: int | None = None


class Plan(NamedTuple):
    """A formula as implementations compute it.

    factor      of s, the same along a row: it multiplies the queries
    hoisted     in the order in which `make("hoisted", value=node)` stand for them in value, score and derivatives
    value       the score, of s = factor scale q k^T, the hoisted numbers and positions
    score       value without the terms that are the same along a row or a column
    row, column the numbers of these terms in `hoisted`; None where there is none
    derivative  of value by s
    weights     derivatives of value by each of the hoisted numbers, then by each of `tables`
    tables      loads that value makes for each pair, by computed indices
    """

    formula: Node
    factor: Node
    hoisted: tuple[Hoisted, ...]
    value: Node
    score: Node
    row: int | None
    column: int | None
    derivative: Node
    weights: tuple[Node, ...]
    tables: tuple[Node, ...]


def stage(x: Node) -> str:
    """How often an expression must be computed: once for a head, a row, a column, a pair of them or a score."""
    if "s" in x.deps:
        return "score"
    of_row = "i" in x.deps or "n" in x.deps
    if "j" in x.deps:
        return "pair" if of_row else "column"
    return "row" if of_row else "head"


def of_distance(x: Node) -> bool:
    """Whether x depends on the positions by i - j alone."""
    free: dict[Node, bool] = {}
    for y in topological([x]):
        if y.op == "leaf":
            free[y] = y.value in "ijns"
        else:
            free[y] = not is_distance(y) and any(free[z] for z in y.args)
    return not free[x]


def is_distance(x: Node) -> bool:
    """Whether x is i - j or j - i."""
    return x.op == "sub" and set(x.args) == {leaf("i"), leaf("j")}


@lru_cache(maxsize=1024)
def plan(text: str, causal: bool = True, window: int | None = None) -> Plan:
    """The plan of a formula, in attention of which these two are known. Raises FormulaError."""
    formula = parse(text)
    try:
        return planned(formula, Reach(causal=causal, window=window))
    except Mistake as mistake:  # constants of the derivative, as of nested powers, that are too large
        raise FormulaError("{} or its derivative cannot be computed, as {}.", Option("formula"), str(mistake)) from None


def planned(formula: Node, reach: Reach) -> Plan:
    """The plan of a formula's graph. Raises Mistake."""
    s = leaf("s")
    (slope,) = derivatives(formula, [s])
    factor = number(1.0)
    if stage(slope) in ("head", "row") and not has_steps(formula):  # the formula is slope s + its value at s = 0
        factor, rest = slope, rebuild(formula, {s: number(0.0)})
        terms = [s, *summands(rest)]
    else:
        terms = summands(formula)
    rows = total([x for x in terms if stage(x) in ("head", "row")])
    columns = total([x for x in terms if stage(x) == "column"])
    hoist = Hoist(reach)
    score = hoist(total([x for x in terms if stage(x) in ("pair", "score")]))
    value = score
    for x in (rows, columns):
        if not is_number(x):
            value = ops.add(value, hoist(x))
    found = tuple(hoist.found.values())
    numbers = {entry.node: k for k, entry in enumerate(found)}
    tables = tuple(x for x in topological([value]) if x.op == "load")
    placed = [placeholder(entry) for entry in found]
    derivative, *weights = derivatives(value, [s, *placed, *tables])
    row, column = numbers.get(rows), numbers.get(columns)
    return Plan(formula, factor, found, value, score, row, column, derivative, tuple(weights), tables)


def has_steps(x: Node) -> bool:
    """Whether x can jump where s does not."""
    return any("s" in y.deps and (y.kind == "truth" or y.op == "floor") for y in topological([x]))


def placeholder(x: Hoisted) -> Node:
    """The node that stands for a hoisted number."""
    return make("hoisted", (), x.node, x.node.kind, DEPS[x.stage])


class Hoist:
    """Replaces the parts of an expression that can be computed beforehand, and collects them."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.found: dict[Node, Hoisted] = {}
        self.done: dict[Node, Node] = {}

    def __call__(self, x: Node) -> Node:
        if x not in self.done:
            self.done[x] = self.replaced(x)
        return self.done[x]

    def replaced(self, x: Node) -> Node:
        at = stage(x)
        if x.op in ("number", "leaf") and x is not leaf("n"):
            return x
        if at in ("head", "row", "column") and (x.kind == "real" or is_costly(x)) and x.kind != "truth":
            return self.hoisted(x, at)
        if at == "pair" and x.kind != "truth":
            if of_distance(x) and is_costly(x) and x.op not in ("add", "sub", "mul", "neg"):
                return self.hoisted(x, "distance")
            bare = [y for y in x.args if y in (leaf("b"), leaf("h"), leaf("i"), leaf("j"))]
            if x.op == "load" and len(set(bare)) == len(x.args):
                return self.hoisted(x, "pair")
        return ops.combine(x, tuple(map(self, self.arguments(x))))

    @staticmethod
    def arguments(x: Node) -> tuple[Node, ...]:
        """The arguments of x; in a product, factors of one stage together, so that they are hoisted as one."""
        groups: dict[str, list[Node]] = {"row": [], "column": [], "": []}
        for y in factors(x) if x.op == "mul" else []:
            groups[{"head": "row"}.get(stage(y), stage(y)) if stage(y) in ("head", "row", "column") else ""].append(y)
        if max(len(groups["row"]), len(groups["column"])) < 2 or not groups[""]:
            return x.args
        product, *others = (reduce(ops.multiply, group) for group in groups.values() if group)
        return product, reduce(ops.multiply, others)

    def hoisted(self, x: Node, at: str) -> Node:
        if x not in self.found:
            self.found[x] = Hoisted(x, at, far_distance(x, self.reach) if at == "distance" else None)
        return placeholder(self.found[x])


def factors(x: Node) -> list[Node]:
    """Factors whose product is x."""
    return [*factors(x.args[0]), *factors(x.args[1])] if x.op == "mul" else [x]


def is_costly(x: Node) -> bool:
    """Whether x contains more than arithmetic on positions."""
    return any(y.op in COSTLY or y is leaf("n") for y in topological([x]))


def far_distance(x: Node, reach: Reach) -> int | None:
    """The least distance from which on x is the same, as the whole numbers in it are; None: there is none."""
    if not reach.causal:
        return None
    parts = whole_parts(x)

    def same(distance: int) -> bool:
        ranges = intervals(parts, Reach(queries=(distance, INF), keys=(0, 0)))
        return all(ranges[y][0] == ranges[y][1] for y in parts)

    if not parts or not same(FURTHEST):
        return None
    low, high = 0, FURTHEST
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if same(middle) else (middle + 1, high)
    return low


def whole_parts(x: Node) -> list[Node]:
    """The largest whole numbers in x that depend on positions."""
    if x.kind == "whole" or x.op == "leaf":
        return [x] if x.deps & {"i", "j", "n"} else []
    return list(dict.fromkeys(y for z in x.args for y in whole_parts(z)))


def summands(x: Node) -> list[Node]:
    """Terms whose sum is x; a factor of a head is multiplied out where that tells a row from a column."""
    match x.op:
        case "add":
            return summands(x.args[0]) + summands(x.args[1])
        case "sub":
            return summands(x.args[0]) + [ops.negate(y) for y in summands(x.args[1])]
        case "neg":
            return [ops.negate(y) for y in summands(x.args[0])]
        case "mul" if stage(x) == "pair":
            for u, v in (x.args, x.args[::-1]):
                if stage(u) == "head" and len(parts := summands(v)) > 1:
                    return [ops.multiply(u, y) for y in parts]
        case "number" if x.value == 0:
            return []
    return [x]


def total(terms: list[Node]) -> Node:
    """The sum of terms."""
    result = number(0.0)
    for x in terms:
        result = ops.add(result, x)
    return real(result)
