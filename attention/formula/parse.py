"""Formulas as text: reads them by a white list over Python's syntax tree, evaluating nothing, and writes them."""

import ast
import warnings
from functools import lru_cache, reduce
from typing import NoReturn

from ..errors import FormulaError, Option
from . import operations as ops
from .graph import LEAVES, Mistake, Node, leaf, number, real, topological

LONGEST = 500  # characters
DEEPEST = 60  # nested expressions
# The names of a call's other arguments, which no tensor of a formula can have.
TAKEN = {"q", "k", "v", "cache", "score", "layout", "scale", "dropout_key", "return_lse", "tensors", "sinks"}

CALLS = {**dict.fromkeys(ops.FUNCTIONS, 1), "min": 2, "max": 2, "where": 3}  # the number of each function's arguments
BINARY: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
}
COMPARE: dict[type[ast.AST], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}


@lru_cache(maxsize=1024)
def parse(text: str) -> Node:
    """The graph of a formula. Raises FormulaError, which shows the place of the mistake."""
    if not text.isascii() or len(text) > LONGEST or not text.strip():
        raise FormulaError(
            f"{{}} must be text of 1 to {LONGEST} characters of ASCII, such as s * log(n).", Option("formula")
        )
    text = " ".join(text.split())
    if "|" in text:
        raise refusal("has no |x|; write abs(x)", text, text.index("|"), text.index("|") + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unusual code
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = (getattr(error, "offset", 0) or 1) - 1
        raise refusal("is not an expression", text, column, column + 1) from None
    return finished(Reader(text).read(tree, DEEPEST))


def finished(x: Node) -> Node:
    """The graph of a whole formula, after checks. Raises FormulaError."""
    formula = Option("formula")
    if x.kind == "truth":
        raise FormulaError("{} is a comparison and not a number; write where(condition, a, b).", formula)
    x = real(x)
    if "s" not in x.deps:
        raise FormulaError("{} does not depend on s, the score that it is to change.", formula)
    nodes = topological([x])
    if any(leaf("b") in y.args and y.op != "load" for y in nodes):
        raise FormulaError("{} computes with b, the number of a sequence, which is an index by itself.", formula)
    return x


def refusal(what: str, text: str, start: int, end: int) -> FormulaError:
    """The error "{formula} <mistake>", with the text of the formula and the marked place below."""
    marks = " " * start + "^" * max(1, end - start)
    return FormulaError("{} {}:\n    {}\n    {}", Option("formula"), what, text, marks)


class Reader:
    """Makes a graph from a syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text

    def refuse(self, what: str, x: ast.AST) -> NoReturn:
        raise refusal(what, self.text, x.col_offset, x.end_col_offset)  # type: ignore[attr-defined]

    def read(self, x: ast.AST, depth: int) -> Node:
        """The node of an expression."""
        if depth == 0:
            self.refuse(f"is nested more than {DEEPEST} deep", x)
        try:
            return self.node(x, depth - 1)
        except Mistake as mistake:
            self.refuse(f"cannot be computed, as {mistake}", x)

    def node(self, x: ast.AST, depth: int) -> Node:
        match x:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return number(value)
            case ast.Name(id=name) if name in LEAVES:
                return leaf(name)
            case ast.Name():  # a tensor without dimensions
                return ops.load(self.tensor(x))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return ops.MAKERS[BINARY[type(op)]](self.read(left, depth), self.read(right, depth))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return ops.negate(self.read(operand, depth))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ops.invert(self.read(operand, depth))
            case ast.BoolOp(op=op, values=values):
                name = "and" if isinstance(op, ast.And) else "or"
                return reduce(ops.MAKERS[name], [self.read(y, depth) for y in values])
            case ast.Compare(left=left, ops=signs, comparators=rights) if all(type(y) in COMPARE for y in signs):
                sides = [self.read(y, depth) for y in (left, *rights)]
                parts = [ops.compare(COMPARE[type(sign)], *sides[n : n + 2]) for n, sign in enumerate(signs)]
                return reduce(ops.MAKERS["and"], parts)
            case ast.IfExp(test=test, body=body, orelse=other):
                return ops.where(self.read(test, depth), self.read(body, depth), self.read(other, depth))
            case ast.Call(func=ast.Name() as called, args=args, keywords=[]):
                return self.call(x, called, [self.read(y, depth) for y in args])
            case ast.Subscript(value=ast.Name() as named, slice=index):
                entries = index.elts if isinstance(index, ast.Tuple) else [index]
                return ops.load(self.tensor(named), *(self.read(y, depth) for y in entries))
        self.refuse(
            "is made of + - * / // % **, comparisons, numbers, functions and tensors by name, and not of this", x
        )

    def call(self, x: ast.Call, called: ast.Name, args: list[Node]) -> Node:
        if called.id not in CALLS:
            self.refuse(f"has no function {called.id}; there are {', '.join(sorted(CALLS))}", called)
        if len(args) != CALLS[called.id]:
            self.refuse(f"calls {called.id} with {len(args)} arguments instead of {CALLS[called.id]}", x)
        return ops.MAKERS[called.id](*args)

    def tensor(self, named: ast.Name) -> str:
        """The name of a tensor. Refuses names that no tensor can have."""
        if named.id in CALLS:
            self.refuse(f"uses the function {named.id} as a number", named)
        if named.id == "b":
            self.refuse("reads b, and b is the number of the sequence; choose another name", named)
        if named.id in LEAVES or named.id in TAKEN or named.id.startswith("_"):
            self.refuse(f"cannot call a tensor {named.id}", named)
        return named.id


INFIX = {"add": ("+", 5), "sub": ("-", 5), "mul": ("*", 6), "div": ("/", 6), "floordiv": ("//", 6), "mod": ("%", 6)}
INFIX |= {"lt": ("<", 3), "le": ("<=", 3), "eq": ("==", 3), "ne": ("!=", 3), "and": ("and", 1), "or": ("or", 0)}


def show(x: Node) -> str:
    """The formula as text, from which `parse` makes the same node."""
    written: dict[Node, tuple[str, int]] = {}  # the text, and the precedence of its operation
    for y in topological([x]):
        written[y] = written_as(y, [written[z] for z in y.args])
    return written[x][0]


def written_as(x: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    def argument(k: int, tightness: int) -> str:
        text, binds = args[k]
        return text if binds >= tightness else f"({text})"

    if x.op in INFIX:
        sign, binds = INFIX[x.op]
        left = binds + 1 if binds == 3 else binds
        return f"{argument(0, left)} {sign} {argument(1, binds + 1)}", binds
    match x.op:
        case "number":
            return repr(x.value), 9 if x.kind == "truth" or x.value >= 0 else 7
        case "leaf":
            return x.value, 9
        case "load":
            return f"{x.value}[{', '.join(text for text, _ in args)}]" if args else x.value, 9
        case "real":
            return args[0]
        case "neg":
            return f"-{argument(0, 7)}", 7
        case "not":
            return f"not {argument(0, 2)}", 2
        case "pow":
            return f"{argument(0, 9)} ** {x.value}", 8
    return f"{x.op}({', '.join(text for text, _ in args)})", 9
