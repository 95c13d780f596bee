"""Formulas in torch: a list of steps, which torch.compile follows, and entries of tensors whose gradients are summed in
a fixed order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gpu import NAMESPACE
from .graph import Node, topological


class Program(NamedTuple):
    """Steps in order, each (operation, numbers of the steps whose results it takes, value), and those to return."""

    steps: tuple[tuple[str, tuple[int, ...], Any], ...]
    outputs: tuple[int, ...]


def program(outputs: Sequence[Node], hoisted: Sequence[Node] = (), tables: Sequence[Node] = ()) -> Program:
    """Steps that compute nodes, of leaves, of hoisted numbers, and of tables: loads that are given like these."""
    numbers: dict[Node, int] = {}
    steps: list[tuple[str, tuple[int, ...], Any]] = []
    given = {x: ("table", (), k) for k, x in enumerate(tables)}
    for x in topological(outputs):
        value = hoisted.index(x.value) if x.op == "hoisted" else (x.value, bare(x)) if x.op == "load" else x.value
        steps.append(given.get(x) or (x.op, tuple(numbers[y] for y in x.args), value))
        numbers[x] = len(steps) - 1
    return Program(tuple(steps), tuple(numbers[x] for x in outputs))


def bare(load: Node) -> tuple[str, ...] | None:
    """The leaves that are a load's indices, if nothing is computed and none comes twice."""
    names = tuple(x.value for x in load.args if x.op == "leaf")
    return names if len(set(names)) == len(load.args) else None


def leaves_of(steps: Program, is_view: Callable[[tuple[str, ...] | None], bool]) -> list[str]:
    """The leaves that a program computes with. `is_view`: whether the entries of a tensor with such bare indices are a
    view of it, which asks for no leaves."""
    names: list[str] = []
    wanted = list(steps.outputs)
    while wanted:
        op, numbers, value = steps.steps[wanted.pop()]
        if op == "leaf":
            names.append(value)
        elif op != "load":
            wanted += numbers
        elif not is_view(value[1]):
            names.append("b")
            wanted += numbers
    return names


class Given(NamedTuple):
    """The inputs of a program.

    leaves   name -> tensor, shaped so that all broadcast: at least those of `leaves_of`
    dtype    of real numbers
    hoisted  in the plan's order
    tables   entries of tables, in the plan's order
    load     (name, leaves that are indices or None, indices) -> entries of a tensor
    """

    leaves: dict[str, Tensor]
    dtype: torch.dtype
    hoisted: list[Any]
    tables: list[Any]
    load: Callable[[str, tuple[str, ...] | None, list[Any]], Tensor] | None = None


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
}


def run(steps: Program, given: Given) -> list[Any]:
    """The results of a program: tensors, or numbers where they are constants."""
    results: list[Any] = []
    for op, numbers, value in steps.steps:
        a = [results[k] for k in numbers]
        match op:
            case "number":
                x = value
            case "leaf":
                x = given.leaves.get(value)
            case "hoisted":
                x = given.hoisted[value]
            case "table":
                x = given.tables[value]
            case "load":
                assert given.load is not None
                name, names = value
                x = given.load(name, names, a)
            case "real":
                x = a[0].to(given.dtype)
            case "floor":
                x = torch.floor(a[0]).long()
            case "pow":
                x = a[0] ** value
            case "where":
                x = torch.where(a[0], *both_tensors(a[1], a[2], given.dtype))
            case "min":
                x = torch.minimum(*both_tensors(a[0], a[1], given.dtype))
            case "max":
                x = torch.maximum(*both_tensors(a[0], a[1], given.dtype))
            case _:
                x = OPERATORS[op](*a)
        results.append(x)
    return [results[k] for k in steps.outputs]


def both_tensors(a: Any, b: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers as tensors of one dtype: the dtype of the operand that is a tensor."""
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        dtype = torch.int64 if isinstance(a, int) and isinstance(b, int) else dtype
        return torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    a, b = (x if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device) for x in (a, b))
    return a, b


class Entries(torch.autograd.Function):
    """x[index] for whole numbers, any of which may come more than once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *index: Tensor) -> Tensor:
        ctx.save_for_backward(*index)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x[index]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_x = sum_of_entries(d_out, list(ctx.saved_tensors), ctx.shape)
        return d_x.to(ctx.dtype), *[None] * len(ctx.saved_tensors)


def entries(x: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The entries of x at whole numbers that broadcast; the gradient of one is the sum over them, in a fixed order."""
    return Entries.apply(x, *index)


def full_index(x: Tensor, index: Sequence[Any], b: Tensor) -> list[Tensor]:
    """An index into x by tensors, each moved into x where it lies outside.

    b  the sequences' numbers, for an x that has them before its other indices
    """
    if x.ndim == len(index) + 1:
        index = [b, *index]
    whole = [y if isinstance(y, Tensor) else torch.tensor(y, device=x.device) for y in index]
    return [y.clamp(0, size - 1) for y, size in zip(whole, x.shape, strict=True)]


@torch.library.custom_op(f"{NAMESPACE}::sum_of_entries", mutates_args=())
def sum_of_entries(terms: Tensor, index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Zeros of `shape`, to which each of the terms is added at its index; in fp64, and in one order."""
    if not index:
        return terms.double().sum().reshape(list(shape))
    place = torch.zeros(terms.shape, dtype=torch.int64, device=terms.device)
    for x, size in zip(index, shape, strict=True):
        place = place * size + x
    total = torch.Size(shape).numel()
    if terms.device.type == "cpu":  # one after the other; index_put would add in parallel
        sums = torch.bincount(place.flatten(), weights=terms.double().flatten(), minlength=total)
    else:  # sorts by place
        sums = torch.zeros(total, dtype=torch.float64, device=terms.device)
        sums.index_put_((place.flatten(),), terms.double().flatten(), accumulate=True)
    return sums.view(*shape)


@sum_of_entries.register_fake
def _(terms: Tensor, index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return terms.new_empty(shape, dtype=torch.float64)
