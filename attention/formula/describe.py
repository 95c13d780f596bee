"""The parts of a formula that change nothing."""

from .graph import Node, topological
from .parse import parse, show
from .plan import stage, summands


def idle(text: str, sinks: bool) -> list[str]:
    """A sentence for each summand that is the same for all keys of a query, which the softmax cancels.

    Not for those with a tensor that others read too: c[h, i] - c[h, j] is one difference.
    """
    if sinks:  # which are no keys
        return []
    parts = summands(parse(text))
    rows = [x for x in parts if stage(x) in ("head", "row")]
    others = tensors([x for x in parts if x not in rows])
    found = [show(x) for x in rows if not tensors([x]) & others]
    return [f"{x} is the same for all keys of a query: it changes nothing" for x in found]


def tensors(parts: list[Node]) -> set[str]:
    """The names of the tensors that expressions read."""
    return {x.value for x in topological(parts) if x.op == "load"}
