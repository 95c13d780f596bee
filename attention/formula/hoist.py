"""The parts of a formula that are computed beforehand, in torch: vectors along heads, rows, columns and distances."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import constant_when_compiled
from .axes import axes
from .evaluate import Instructions, ProgramInputs, entries, full_index, leaves_of, program, run
from .graph import Node, is_number, leaf, topological
from .plan import plan


class Steps(NamedTuple):
    """A plan as programs, made of tuples, numbers and text alone, which are constants for torch.compile.

    factor       of s, where it is not a number
    scale        of s, where the factor is a number
    hoisted      (stage, far, program) of each hoisted value
    value        the score
    gradients    the score, and its derivatives by s, by each hoisted value and by each table's entry
    tables       (name, program of the indices) of each table
    axes         (name, meaning of each axis) of the tensors; see axes.py
    by_position  whether the computation of a score needs the positions of its query and key, or its head
    is_identity  whether the score is s times the factor
    """

    factor: Instructions | None
    scale: float
    hoisted: tuple[tuple[str, int | None, Instructions], ...]
    value: Instructions
    gradients: Instructions
    tables: tuple[tuple[str, Instructions], ...]
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    by_position: bool
    is_identity: bool

    def programs(self) -> list[tuple[str, Instructions]]:
        """The programs that run before the scores, except those of distances, with their stages."""
        factor = [] if self.factor is None else [("row", self.factor)]
        return factor + [(stage, steps) for stage, _, steps in self.hoisted if stage != "distance"]


@constant_when_compiled
def steps_of(text: str, causal: bool, window: int | None) -> Steps:
    """The programs of a formula. Raises FormulaError."""
    p = plan(text, causal, window)
    nodes = [x.node for x in p.hoisted]

    def late(*outputs: Node) -> Instructions:
        return program(outputs, nodes, p.tables)

    constant = is_number(p.factor)
    return Steps(
        factor=None if constant else program([p.factor]),
        scale=p.factor.value if constant else 1.0,
        hoisted=tuple((x.stage, x.far, program([x.node])) for x in p.hoisted),
        value=late(p.value),
        gradients=late(p.value, p.derivative, *p.weights),
        tables=tuple((x.value, program(x.args, nodes)) for x in p.tables),
        by_position=any(x.op == "leaf" and x is not leaf("s") for x in topological([p.value, *p.tables]))
        or any(x.stage == "distance" for x in p.hoisted),
        axes=tuple(axes(text).items()),
        is_identity=p.value is leaf("s"),
    )


class CallPlace(NamedTuple):
    """The positions of a call's queries and keys.

    sizes      (B, H, T, S): sequences, query heads, queries and keys
    device     of the tensors
    i          positions of the queries, (T,) or, with lengths, (B, T); 0 instead of negative ones
    j          positions of the keys, (S,)
    n          the number of keys that each query sees, at least 1, (T,) or (B, T)
    q_start    position of the first query, if the others follow it; None with lengths, and if it is negative
    k_start    position of the first key
    distances  the lowest and the highest i - j of pairs that see each other

    i, j and n are None where no program needs them.
    """

    sizes: tuple[int, int, int, int]
    device: torch.device
    i: Tensor | None
    j: Tensor | None
    n: Tensor | None
    q_start: int | None
    k_start: int
    distances: tuple[int, int]

    def leaves(self, stage: str, far: int | None, names: Sequence[str]) -> dict[str, Any]:
        """The leaves `names` for a stage, in shapes that broadcast to (B, H, length), or for pairs to (B, H, T, S)."""
        device, last = self.device, (1, 1) if stage == "pair" else (1,)
        leaves = {}
        if "h" in names:
            leaves["h"] = torch.arange(self.sizes[1], device=device).view(-1, *last)
        if "b" in names:
            leaves["b"] = torch.arange(self.sizes[0], device=device).view(-1, 1, *last)
        if stage == "distance":
            d = distances(self.distances, far, device)
            return leaves | {"i": d, "j": torch.zeros_like(d[0])}
        if self.j is not None:
            leaves["j"] = self.j
        for name, x in (("i", self.i), ("n", self.n)):
            if x is not None:
                x = x.unsqueeze(1) if x.ndim == 2 else x  # (B, 1, T)
                leaves[name] = x.unsqueeze(-1) if stage == "pair" else x
        return leaves

    def asked(self, stage: str, steps: Instructions) -> list[str]:
        """The leaves that a program of this stage needs."""
        return leaves_of(steps, lambda names: self.is_view(names, stage))

    def is_view(self, names: tuple[str, ...] | None, stage: str) -> bool:
        """Whether the entries of a tensor at these bare indices are a view of it."""
        return names is not None and stage != "distance" and ("i" not in names or self.q_start is not None)


def distances(reach: tuple[int, int], far: int | None, device: torch.device) -> Tensor:
    """The distances of a hoisted vector. The last one stands for all greater distances."""
    low, high = reach
    return torch.arange(low, max(low, high if far is None else min(high, far)) + 1, device=device)


def scaled_queries(q: Tensor, factors: Tensor) -> Tensor:
    """q (B, H, T, D), each row times its factor."""
    return (q.to(factors.dtype) * factors.unsqueeze(-1)).to(q.dtype)


def evaluated(
    stage: str, far: int | None, steps: Instructions, tensors: dict[str, Tensor], place: CallPlace, dtype: torch.dtype
) -> Tensor:
    """A hoisted value, (B or 1, H or 1, length), with length 1 for a head; for pairs (B or 1, H or 1, T, S)."""
    if stage == "distance" and not torch.compiler.is_compiling():
        part = part_of_table(steps, place.distances, far)
        if part is not None and part.end <= tensors[part.name].shape[-1]:
            x = tensors[part.name][..., part.first : part.end].to(dtype)
            x = x if part.by_head else x.unsqueeze(-2)
            return x.reshape(*[1] * (3 - x.ndim), *x.shape)
    leaves = place.leaves(stage, far, place.asked(stage, steps))

    def load(name: str, names: tuple[str, ...] | None, index: Sequence[Any]) -> Tensor:
        x = tensors[name].to(dtype)
        if names is not None and place.is_view(names, stage):
            return spread(x, names, place, stage)
        return entries(x, full_index(x, index, leaves["b"]))

    (x,) = run(steps, ProgramInputs(leaves, dtype, [], [], load))
    ndim = 4 if stage == "pair" else 3
    if not isinstance(x, Tensor):
        x = torch.full((), x, dtype=dtype, device=place.device)
    return x.reshape(*[1] * (ndim - x.ndim), *x.shape)


class TablePart(NamedTuple):
    """The entries from `first` to `end` of a table's last axis, for each head or for all."""

    name: str
    first: int
    end: int
    by_head: bool


@lru_cache(maxsize=1024)
def part_of_table(steps: Instructions, reach: tuple[int, int], far: int | None) -> TablePart | None:
    """The part of a table that a vector of distances is, as in table[h, min(i - j, 127)]; None if it is none."""
    op, numbers, value = steps.steps[steps.outputs[0]]
    if op != "load" or [steps.steps[k][2] for k in numbers[:-1]] not in ([], ["h"]):
        return None
    index = Instructions(steps.steps[: numbers[-1] + 1], numbers[-1:])
    if not {"i", "j"}.issuperset(leaves_of(index, lambda names: False)):
        return None
    d = distances(reach, far, torch.device("cpu"))
    (found,) = run(index, ProgramInputs({"i": d, "j": torch.zeros_like(d[0])}, torch.float32, [], []))
    first = int(found[0]) if isinstance(found, Tensor) and found.shape == d.shape else -1
    if first < 0 or not torch.equal(found, torch.arange(first, first + len(d))):
        return None
    return TablePart(value[0], first, first + len(d), len(numbers) > 1)


def spread(x: Tensor, names: tuple[str, ...], place: CallPlace, stage: str) -> Tensor:
    """A view of the entries x[h, i] as (B or 1, H, T), for indices `names` in any order."""
    names = ("b", *names) if x.ndim == len(names) + 1 else names
    for name, start, length in (("i", place.q_start, place.sizes[2]), ("j", place.k_start, place.sizes[3])):
        if name in names and start is not None and (start, length) != (0, x.shape[names.index(name)]):
            x = x.narrow(names.index(name), start, length)
    order = ("b", "h", "i", "j") if stage == "pair" else ("b", "h", "j" if "j" in names else "i")
    x = x.permute([names.index(name) for name in order if name in names])
    for k, name in enumerate(order):
        if name not in names:
            x = x.unsqueeze(k)
    return x
