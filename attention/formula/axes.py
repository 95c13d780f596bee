"""The tensors that a formula reads, and the meaning of their axes."""

from __future__ import annotations

from functools import lru_cache

from ..errors import FormulaError, Option
from .graph import Node, topological
from .parse import parse

AXES = {"b": "batch", "h": "head", "i": "row", "j": "column"}

Axes = tuple[str, ...]


def loads(text: str) -> list[Node]:
    """The nodes of a formula that load an entry of a tensor."""
    return [x for x in topological([parse(text)]) if x.op == "load"]


@lru_cache(maxsize=1024)
def axes(text: str) -> dict[str, Axes]:
    """The tensors of a formula, by name, with the meaning of each axis.

    "batch", "head", "row" (positions of queries), "column" (positions of keys), "position" (of both), or "table" for an
    axis with any other index. A tensor can have a batch axis before these. Raises FormulaError.
    """
    letters: dict[str, list[set[str]]] = {}
    for x in loads(text):
        names = [AXES.get(y.value, "table") if y.op == "leaf" else "table" for y in x.args]
        known = letters.setdefault(x.value, [set() for _ in names])
        if len(known) != len(names):
            raise FormulaError(
                f"{{}} has {x.value} with {len(known)} indices and with {len(names)}.", Option("formula")
            )
        for axis, name in zip(known, names, strict=True):
            axis.add(name)

    def together(names: set[str]) -> str:
        return next(iter(names)) if len(names) == 1 else "position" if names == {"row", "column"} else "table"

    return {name: tuple(map(together, known)) for name, known in letters.items()}
