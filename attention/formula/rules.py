"""The tensors that a formula needs, and its mistakes that are known before a call: in indices, sizes and values."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import FormulaError, Option
from .axes import axes, loads
from .evaluate import ProgramInputs, program, run
from .graph import Node, leaf, topological
from .parse import parse, show
from .plan import plan, stage, summands
from .ranges import INF, Reach, intervals

MOST_OPERATIONS = 64  # of a score and its derivative
PROBED = 16  # tokens for which a formula is tried
FORMULA = Option("formula")
LINEAR = {"add", "sub", "mul", "div", "neg", "real", "number", "leaf", "load"}


@lru_cache(maxsize=1024)
def check(text: str, causal: bool, window: int | None) -> None:
    """Raise FormulaError for a formula that no call can compute."""
    axes(text)
    for x in loads(text):
        check_index(x, Reach(causal=causal, window=window), None)
    check_distances(text)
    p = plan(text, causal, window)
    count = sum(bool(x.args) and stage(x) in ("score", "pair") for x in topological([p.value, p.derivative]))
    if count > MOST_OPERATIONS:
        raise FormulaError(
            f"{{}} and its derivative take {count} operations for each score, of which there may be {MOST_OPERATIONS}.",
            FORMULA,
        )
    probe(text, causal, window)


def check_distances(text: str) -> None:
    """Raise FormulaError for t i - t j with a number t of a head. It is t (i - j), but its gradient would be the sums
    over rows times i less those over columns times j, which cancel only up to rounding, times the position."""
    for x in topological([parse(text)]):
        positions: dict[frozenset[Node], set[frozenset[str]]] = {}
        for term in summands(x) if x.op in ("add", "sub") and x.kind == "real" else []:
            nodes = topological([term])
            read = frozenset(y for y in nodes if y.op == "load" and stage(y) == "head")
            if read and LINEAR.issuperset(y.op for y in nodes):
                positions.setdefault(read, set()).add(term.deps & {"i", "j"})
        for read, found in positions.items():
            if {frozenset("i"), frozenset("j")} <= found:
                factor = show(next(iter(read)))
                raise FormulaError("{} multiplies i and j by {} apart; write {} * (i - j).", FORMULA, factor, factor)


def check_index(x: Node, reach: Reach, sizes: tuple[int, ...] | None) -> None:
    """Raise FormulaError where an index of a load can be negative or, with `sizes`, too large for its axis."""
    ranges = intervals(list(x.args), reach)
    for k, y in enumerate(x.args):
        low, high = ranges[y]
        if low < 0:
            lowest = "negative" if low == -INF else f"as low as {low:.0f}"
            raise FormulaError(
                "{} reads {}, whose index {} can be {}; write max({}, 0).", FORMULA, show(x), show(y), lowest, show(y)
            )
        if sizes is not None and high >= sizes[k] and y is not leaf("b"):
            instead = f"write min({show(y)}, {sizes[k] - 1})" if y.op != "leaf" else "give it more"
            raise FormulaError(
                "{} reads {}, whose index {} reaches {}, and {} has {} entries there; {}.",
                *(FORMULA, show(x), show(y), f"{high:.0f}", x.value, sizes[k], instead),
            )


def check_tensors(text: str, tensors: Mapping[str, Tensor], B: int, reach: Reach) -> None:
    """Raise FormulaError unless all tensors of the formula are given, and are large enough for the call's indices."""
    for name, names in axes(text).items():
        x, meaning = tensors.get(name), f"({', '.join(names)}{',' * (len(names) == 1)})"
        if x is None:
            raise FormulaError(f"{{}} needs the tensor {name} {meaning}.", FORMULA)
        batches = x.ndim - len(names)
        if batches not in (0, 1) or not x.is_floating_point():
            raise FormulaError(
                f"{{}} takes {name} {meaning}, perhaps with a batch before; got {tuple(x.shape)} of {x.dtype}.", FORMULA
            )
        sizes = dict(zip(("batch", *names)[1 - batches :], x.shape, strict=True))
        for axis, size in (("batch", B), ("head", int(reach.heads))):
            if axis in sizes and sizes[axis] != size and not (axis == "batch" and sizes[axis] == 1):
                raise FormulaError(
                    f"{{}} takes {name} {meaning} with {size} along {axis}; got {tuple(x.shape)}.", FORMULA
                )
        for y in loads(text):
            if y.value == name:
                check_index(y, reach, tuple(x.shape[batches:]))


def probe(text: str, causal: bool, window: int | None) -> None:
    """Raise FormulaError for a formula that has no finite value for some query and key, whatever its tensors hold.

    The formula is tried for a few tokens, scores from -8 to 8, and tensors filled with several constants.
    """
    positions = torch.arange(PROBED)
    i, j = positions[:, None], positions
    low, high = Reach((0, PROBED - 1), (0, PROBED - 1), causal, window).distance()
    seen = (i - j >= low) & (i - j <= high)
    leaves = {
        "s": torch.linspace(-8, 8, 2 * PROBED**2, dtype=torch.float64).view(2, PROBED, PROBED),
        "i": i,
        "j": torch.where(seen, j, i),
        "h": torch.arange(2)[:, None, None],
        "n": seen.sum(dim=1, keepdim=True),
    }
    steps = program([parse(text)])
    for fill in (0.5, -0.5, 1.5):
        entry = torch.full((), fill, dtype=torch.float64)
        (value,) = run(steps, ProgramInputs(leaves, torch.float64, [], [], lambda *_, entry=entry: entry))
        worst = (~value.isfinite() & seen).any(dim=0).nonzero()
        if not len(worst):
            return
    query, key = worst[0].tolist()
    raise FormulaError(f"{{}} has no finite value for the query at position {query} and the key at {key}.", FORMULA)
