"""A formula in words: the parts computed for each score, and the parts computed in advance."""

from __future__ import annotations

from .derivative import derivatives
from .graph import Node, is_number, leaf, topological
from .parse import parse, show
from .plan import plan, stage, summands

ALONG = {
    "head": "for each head",
    "row": "for each query",
    "column": "for each key",
    "distance": "for each distance",
    "pair": "read for each query and key",
}


def describe(text: str, causal: bool, window: int | None, sinks: bool) -> str:
    """The formula, its derivative by s, the parts that are computed in advance, and those that change nothing."""
    x, p = parse(text), plan(text, causal, window)
    (slope,) = derivatives(x, [leaf("s")])
    parts = [f"score: {show(x)}", f"derivative by s: {show(slope)}"]
    if not is_number(p.factor, 1):
        parts.append(f"multiplied into the queries: {show(p.factor)}")
    parts += [f"{ALONG[part.stage]}: {show(part.node)}" for part in p.hoisted]
    return "  ".join(parts + idle(text, sinks))


def idle(text: str, sinks: bool) -> list[str]:
    """A sentence for each summand that changes nothing."""
    parts = [] if sinks else without_effect(text)  # sinks are no keys
    return [f"{show(x)} is the same for all keys of a query: it changes nothing" for x in parts]


def without_effect(text: str) -> list[Node]:
    """The summands that are the same for all keys of a query, which the softmax cancels.

    Not those with a tensor that others read too: c[h, i] - c[h, j] is one difference.
    """
    parts = summands(parse(text))
    rows = [x for x in parts if stage(x) in ("head", "row")]
    others = tensors([x for x in parts if x not in rows])
    return [x for x in rows if not tensors([x]) & others]


def tensors(parts: list[Node]) -> set[str]:
    """The names of the tensors that expressions read."""
    return {x.value for x in topological(parts) if x.op == "load"}
