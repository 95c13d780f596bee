"""The plan of a formula: the parts computed once for a head, row, column or distance, and the parts for each score.

    formula = value(factor s, hoisted values, i, j)

A part that is the same for a head, along a row or column, or for all pairs at one distance i - j is hoisted: torch
computes it once, before the scores. The implementation that computes the scores reads the hoisted vectors, and returns
their gradients, from which autograd computes those of the caller's tensors.

A factor of s that is the same along a row multiplies the queries instead, if the rest is at most one hoisted value that
is added: there are kernels for these scores. It is rounded with the queries. In other formulas it multiplies the
scores, in fp32.
"""

from bisect import bisect_left
from functools import lru_cache, reduce
from typing import NamedTuple

from ..errors import FormulaError, Option
from . import operations as ops
from .derivative import derivatives
from .graph import Mistake, Node, is_number, leaf, make, number, real, topological
from .operations import rebuild
from .parse import parse
from .ranges import INF, Reach, intervals

FURTHEST = 2**20  # the greatest distance at which a vector may become constant
COSTLY = {"exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "floor", "load"}
DEPS = {"head": (), "row": ("i",), "column": ("j",), "distance": ("i", "j"), "pair": ("i", "j")}


class Hoisted(NamedTuple):
    """A part that is computed before the scores. It may differ from sequence to sequence and from head to head.

    node   the expression
    stage  "head": one value; "row" or "column": one for each query or key; "distance": one for each i - j;
           "pair": one for each query and key, read from a tensor that has an entry for each
    far    the distance from which on all values are equal; None: there is none
    """

    node: Node
    stage: str
    far: int | None = None


class Plan(NamedTuple):
    """A formula as implementations compute it.

    factor       of s, the same along a row; it multiplies the queries
    hoisted      the hoisted parts; nodes `make("hoisted", value=node)` stand for them in value, score and derivatives
    value        the score as a function of s = factor scale q k^T, the hoisted values and positions
    score        `value` without the summands that are the same along a row or a column
    row, column  the indices of these summands in `hoisted`; None where there is none
    derivative   of `value` by s
    weights      the derivatives of `value` by each hoisted value, then by each of `tables`
    tables       the loads for each pair of query and key whose indices are computed
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
    """How often an expression must be computed: once for each head, row, column, pair of query and key, or score."""
    if "s" in x.deps:
        return "score"
    of_row = "i" in x.deps or "n" in x.deps
    if "j" in x.deps:
        return "pair" if of_row else "column"
    return "row" if of_row else "head"


def of_distance(x: Node) -> bool:
    """Whether x depends on the positions only through i - j."""
    free: dict[Node, bool] = {}
    for y in topological([x]):
        if y.op == "leaf":
            free[y] = y.value in "ijns"
        else:
            is_distance = y.op == "sub" and set(y.args) == {leaf("i"), leaf("j")}
            free[y] = not is_distance and any(free[z] for z in y.args)
    return not free[x]


@lru_cache(maxsize=1024)
def plan(text: str, causal: bool = True, window: int | None = None) -> Plan:
    """The plan of a formula for a causal or full attention with this window. Raises FormulaError."""
    try:
        return planned(parse(text), Reach(causal=causal, window=window))
    except Mistake as mistake:  # such as too large constants in the derivative of nested powers
        raise FormulaError("{} or its derivative cannot be computed, as {}.", Option("formula"), str(mistake)) from None


def planned(formula: Node, reach: Reach) -> Plan:
    """The plan of a formula's graph. Raises Mistake."""
    s = leaf("s")
    (slope,) = derivatives(formula, [s])
    if stage(slope) not in ("head", "row") or has_steps(formula):
        return arranged(formula, number(1.0), summands(formula), reach)
    rest = summands(rebuild(formula, {s: number(0.0)}))  # the formula is slope s + its value at s = 0
    p = arranged(formula, slope, [s, *rest], reach)
    if is_number(slope) or adds_one_value(p):
        return p
    return arranged(formula, number(1.0), [ops.multiply(slope, s), *rest], reach)


def adds_one_value(p: Plan) -> bool:
    """Whether a plan leaves s as it is or adds one hoisted value to it, besides what is the same along a row."""
    s = leaf("s")
    if p.column is not None:
        return p.score is s or subtracted(p.score) is not None
    return p.score is s or any(p.score is ops.add(s, placeholder(x)) for x in p.hoisted)


def subtracted(score: Node) -> Node | None:
    """y_j where a score is s + max(x_i - y_j, -1e9), as that of a sum in parts is (model/score_tensors.py)."""
    if score.op != "add" or score.args[0] is not leaf("s") or score.args[1].op != "max":
        return None
    difference, least = score.args[1].args
    of_pairs = difference.op == "sub" and [x.deps for x in difference.args] == [{"i"}, {"j"}]
    return difference.args[1] if of_pairs and is_number(least, -1e9) else None


def arranged(formula: Node, factor: Node, parts: list[Node], reach: Reach) -> Plan:
    """The plan of a formula that is the sum of `parts`, in which s is already multiplied by the factor."""
    s = leaf("s")
    rows = total([x for x in parts if stage(x) in ("head", "row")])
    columns = total([x for x in parts if stage(x) == "column"])
    hoist = Hoist(reach)
    score = hoist(total([x for x in parts if stage(x) in ("pair", "score")]))
    value = score
    for x in (rows, columns):
        if not is_number(x):
            value = ops.add(value, hoist(x))
    hoisted = tuple(hoist.entries.values())
    index = {entry.node: k for k, entry in enumerate(hoisted)}
    tables = tuple(x for x in topological([value]) if x.op == "load")
    derivative, *weights = derivatives(value, [s, *map(placeholder, hoisted), *tables])
    row, column = index.get(rows), index.get(columns)
    return Plan(formula, factor, hoisted, value, score, row, column, derivative, tuple(weights), tables)


def has_steps(x: Node) -> bool:
    """Whether x can be discontinuous in s."""
    return any("s" in y.deps and (y.kind == "truth" or y.op == "floor") for y in topological([x]))


def placeholder(x: Hoisted) -> Node:
    """The node that stands for a hoisted value."""
    return make("hoisted", (), x.node, x.node.kind, DEPS[x.stage])


class Hoist:
    """Replaces the parts of an expression that can be hoisted, and collects them in `entries`."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.entries: dict[Node, Hoisted] = {}
        self.done: dict[Node, Node] = {}

    def __call__(self, x: Node) -> Node:
        if x not in self.done:
            self.done[x] = self.replaced(x)
        return self.done[x]

    def replaced(self, x: Node) -> Node:
        of = stage(x)
        if x.op in ("number", "leaf") and x is not leaf("n"):
            return x
        if of in ("head", "row", "column") and (x.kind == "real" or is_costly(x)) and x.kind != "truth":
            return self.hoisted(x, of)
        if of == "pair" and x.kind != "truth":
            if of_distance(x) and is_costly(x) and x.op not in ("add", "sub", "mul", "neg"):
                return self.hoisted(x, "distance")
            bare = [y for y in x.args if y in map(leaf, "bhij")]
            if x.op == "load" and len(set(bare)) == len(x.args):
                return self.hoisted(x, "pair")
        return ops.combine(x, tuple(map(self, self.arguments(x))))

    @staticmethod
    def arguments(x: Node) -> tuple[Node, ...]:
        """The arguments of x. Factors of one stage are multiplied first, so that they are hoisted together."""
        groups: dict[str, list[Node]] = {"row": [], "column": [], "": []}
        for y in factors(x):
            groups[{"head": "row", "row": "row", "column": "column"}.get(stage(y), "")].append(y)
        if max(len(groups["row"]), len(groups["column"])) < 2 or not groups[""]:
            return x.args
        product, *others = (reduce(ops.multiply, group) for group in groups.values() if group)
        return product, reduce(ops.multiply, others)

    def hoisted(self, x: Node, of: str) -> Node:
        if x not in self.entries:
            self.entries[x] = Hoisted(x, of, far_distance(x, self.reach) if of == "distance" else None)
        return placeholder(self.entries[x])


def factors(x: Node) -> list[Node]:
    """Factors whose product is x."""
    return [*factors(x.args[0]), *factors(x.args[1])] if x.op == "mul" else [x]


def is_costly(x: Node) -> bool:
    """Whether x contains more than arithmetic on positions."""
    return any(y.op in COSTLY or y is leaf("n") for y in topological([x]))


def far_distance(x: Node, reach: Reach) -> int | None:
    """The least distance from which on x is constant, because the integers in it are; None: there is none."""
    if not reach.causal:
        return None
    parts = whole_parts(x)

    def same(distance: int) -> bool:
        ranges = intervals(parts, Reach(queries=(distance, INF), keys=(0, 0)))
        return all(ranges[y][0] == ranges[y][1] for y in parts)

    if not parts or not same(FURTHEST):
        return None
    return bisect_left(range(FURTHEST), True, key=same)


def whole_parts(x: Node) -> list[Node]:
    """The largest integer expressions in x that depend on positions."""
    if x.kind == "whole" or x.op == "leaf":
        return [x] if x.deps & {"i", "j", "n"} else []
    return list(dict.fromkeys(y for z in x.args for y in whole_parts(z)))


def summands(x: Node) -> list[Node]:
    """Expressions whose sum is x. A factor of a head is multiplied out, which separates rows from columns."""
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
    """The sum of expressions."""
    return real(reduce(ops.add, terms, number(0.0)))
