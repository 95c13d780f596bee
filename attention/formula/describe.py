"""The parts of a formula that change nothing."""

from __future__ import annotations

from .graph import Node, topological
from .parse import parse, show
from .plan import stage, summands


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
