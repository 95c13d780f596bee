"""Formulas computed in torch, as lists of steps that torch.compile can trace; and entries of tensors, whose gradients
are summed in a fixed order."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import custom_operator
from .graph import Node, topological
from .operations import COMPARISONS, FUNCTIONS


class Instructions(NamedTuple):
    """Steps in order, each (operation, steps that give its arguments, value), and the steps that give the results."""

    steps: tuple[tuple[str, tuple[int, ...], Any], ...]
    outputs: tuple[int, ...]


def program(outputs: Sequence[Node], hoisted: Sequence[Node] = (), tables: Sequence[Node] = ()) -> Instructions:
    """The steps that compute nodes from leaves, hoisted values, and tables: loads whose entries are given too."""
    index: dict[Node, int] = {}
    steps: list[tuple[str, tuple[int, ...], Any]] = []
    of_tables = {x: ("table", (), k) for k, x in enumerate(tables)}
    for x in topological(outputs):
        value = hoisted.index(x.value) if x.op == "hoisted" else (x.value, bare(x)) if x.op == "load" else x.value
        steps.append(of_tables.get(x) or (x.op, tuple(index[y] for y in x.args), value))
        index[x] = len(steps) - 1
    return Instructions(tuple(steps), tuple(index[x] for x in outputs))


def bare(load: Node) -> tuple[str, ...] | None:
    """The indices of a load, if each is a leaf and no leaf comes twice; otherwise None."""
    names = tuple(x.value for x in load.args if x.op == "leaf")
    return names if len(set(names)) == len(load.args) else None


def leaves_of(steps: Instructions, is_view: Callable[[tuple[str, ...] | None], bool]) -> list[str]:
    """The leaves that a program needs.

    is_view  whether a load with these bare indices is a view of its tensor, which needs no leaves
    """
    names: list[str] = []
    waiting = list(steps.outputs)
    while waiting:
        op, arguments, value = steps.steps[waiting.pop()]
        if op == "leaf":
            names.append(value)
        elif op != "load":
            waiting += arguments
        elif not is_view(value[1]):
            names.append("b")
            waiting += arguments
    return names


class ProgramInputs(NamedTuple):
    """The inputs of a program.

    leaves   name -> tensor, in shapes that broadcast: at least those of `leaves_of`
    dtype    of real values
    hoisted  the hoisted values, in the plan's order
    tables   the entries of tables, in the plan's order
    load     (name, bare indices or None, indices) -> entries of a tensor
    """

    leaves: dict[str, Any]
    dtype: torch.dtype
    hoisted: list[Any]
    tables: list[Any]
    load: Callable[[str, tuple[str, ...] | None, list[Any]], Tensor] | None = None


OPERATORS: dict[str, Callable[..., Any]] = {
    **{op: getattr(operator, op) for op in ("add", "sub", "mul", "neg", "floordiv", "mod", *COMPARISONS)},
    "div": operator.truediv,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    **{name: getattr(torch, name) for name in FUNCTIONS},
}


def run(steps: Instructions, inputs: ProgramInputs) -> list[Any]:
    """The results of a program: tensors, or Python numbers for constants."""
    results: list[Any] = []
    for op, arguments, value in steps.steps:
        a = [results[k] for k in arguments]
        match op:
            case "number":
                x = value
            case "leaf":
                x = inputs.leaves.get(value)
            case "hoisted":
                x = inputs.hoisted[value]
            case "table":
                x = inputs.tables[value]
            case "load":
                assert inputs.load is not None
                name, names = value
                x = inputs.load(name, names, a)
            case "real":
                x = a[0].to(inputs.dtype)
            case "floor":
                x = torch.floor(a[0]).long()
            case "pow":
                x = a[0] ** value
            case "where":
                x = torch.where(a[0], *both_tensors(inputs.dtype, *a[1:]))
            case "min":
                x = torch.minimum(*both_tensors(inputs.dtype, *a))
            case "max":
                x = torch.maximum(*both_tensors(inputs.dtype, *a))
            case _:
                x = OPERATORS[op](*a)
        results.append(x)
    return [results[k] for k in steps.outputs]


def both_tensors(dtype: torch.dtype, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Two operands as tensors of one dtype: that of the operand which is a tensor already."""
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        dtype = torch.int64 if isinstance(a, int) and isinstance(b, int) else dtype
        return torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    a, b = (x if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device) for x in (a, b))
    return a, b


class Entries(torch.autograd.Function):
    """x[index] for integer indices, any of which may repeat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *index: Tensor) -> Tensor:
        ctx.save_for_backward(*index)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x[index]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return sum_of_entries(d_out, list(ctx.saved_tensors), ctx.shape).to(ctx.dtype), *[None] * len(ctx.saved_tensors)


def entries(x: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The entries of x at integer indices that broadcast. The gradient of an entry is summed in a fixed order."""
    return Entries.apply(x, *index)


def full_index(x: Tensor, index: Sequence[Any], b: Tensor) -> list[Tensor]:
    """The indices as tensors, clamped to the sizes of x.

    b  the numbers of the sequences, for an x with a batch axis before the other axes
    """
    if x.ndim == len(index) + 1:
        index = [b, *index]
    tensors = [y if isinstance(y, Tensor) else torch.tensor(y, device=x.device) for y in index]
    return [y.clamp(0, size - 1) for y, size in zip(tensors, x.shape, strict=True)]


def add_entries(terms: Tensor, index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """A tensor of `shape` with the sums of the terms at each index, added in fp64 in a fixed order."""
    if not index:
        return terms.double().sum().reshape(list(shape))
    place = torch.zeros(terms.shape, dtype=torch.int64, device=terms.device)
    for x, size in zip(index, shape, strict=True):
        place = place * size + x
    total = torch.Size(shape).numel()
    place, terms = place.flatten(), terms.double().flatten()
    if terms.device.type == "cpu":  # in sequence; index_put would add in parallel
        sums = torch.bincount(place, weights=terms, minlength=total)
    else:  # index_put_ sorts by place
        sums = torch.zeros(total, dtype=torch.float64, device=terms.device)
        sums.index_put_((place,), terms, accumulate=True)
    return sums.view(*shape)


sum_of_entries = custom_operator(
    "sum_of_entries", add_entries, lambda terms, _, shape: terms.new_empty(shape, dtype=torch.float64)
)
