"""A formula in words: the parts computed for each score, and the parts computed in advance."""

from __future__ import annotations

from .derivative import derivatives
from .graph import is_number, leaf
from .parse import parse, show
from .plan import plan

ALONG = {
    "head": "for each head",
    "row": "for each query",
    "column": "for each key",
    "distance": "for each distance",
    "pair": "read for each query and key",
}


def describe(text: str, causal: bool, window: int | None) -> str:
    """The formula, its derivative by s, and the parts that are computed in advance."""
    x, p = parse(text), plan(text, causal, window)
    (slope,) = derivatives(x, [leaf("s")])
    parts = [f"score: {show(x)}", f"derivative by s: {show(slope)}"]
    if not is_number(p.factor, 1):
        parts.append(f"multiplied into the queries: {show(p.factor)}")
    parts += [f"{ALONG[part.stage]}: {show(part.node)}" for part in p.hoisted]
    return "  ".join(parts)
