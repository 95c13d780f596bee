"""The tensors that a formula reads, and the meaning of their axes."""

from functools import lru_cache

from ..errors import FormulaError, Option
from . import operations as ops
from .graph import Node, leaf, topological
from .parse import parse, show

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
        axis_letters = letters.setdefault(x.value, [set() for _ in names])
        if len(axis_letters) != len(names):
            raise FormulaError(
                f"{{}} has {x.value} with {len(axis_letters)} indices and with {len(names)}.", Option("formula")
            )
        for axis, name in zip(axis_letters, names, strict=True):
            axis.add(name)

    def together(names: set[str]) -> str:
        return next(iter(names)) if len(names) == 1 else "position" if names == {"row", "column"} else "table"

    return {name: tuple(map(together, axis_letters)) for name, axis_letters in letters.items()}


@lru_cache(maxsize=1024)
def from_head(text: str, first: int) -> str:
    """The formula of some of its heads, of which the one with the number `first` is then number 0.

    A tensor's axis of heads keeps its index: it has the entries of these heads alone.
    """
    used, root = axes(text), parse(text)
    change: dict[Node, Node] = {leaf("h"): ops.add(leaf("h"), first)}
    for x in topological([root]):
        axes_of = used[x.value] if x.op == "load" else ()
        args = tuple(
            y if y is leaf("h") and axes_of and axes_of[k] == "head" else change[y] for k, y in enumerate(x.args)
        )
        change.setdefault(x, x if args == x.args else ops.combine(x, args))
    return text if change[root] is root else show(change[root])
