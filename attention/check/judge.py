"""Decides whether errors are rounding: row by row, by comparison with the errors of the same-precision formula.

A row belongs to one query or key: the last dimension of out, dq, dk and dv, or one value of lse; a sink is a row too.
The error of a row is measured in units of the rounding to expect of it (formula.py), so that a row of small values
counts as much as one of large values. An implementation's worst row may be LIMITS times as far from fp64 as the worst
row of the formula in the same precision: twice for out and lse, three times for gradients, as FlashAttention tests it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .formula import RESULTS, Problem, evaluate, expected_rounding

LIMITS = {"out": 2.0, "lse": 2.0}
GRADIENTS_LIMIT = 3.0
WIDE = ("out", "dq", "dk", "dv", "dbias")  # results in the inputs' precision; the others may be fp32's


def least(n: int) -> float:
    """The least error, in units of the expected rounding, that the formula is credited with for n elements.

    Where little is computed, the formula may be exact by accident. The largest of n normal numbers is about
    sqrt(2 log n) standard deviations from zero.
    """
    return max(1.5, 0.7 * math.sqrt(1 + math.log(n)))


@dataclass(frozen=True)
class Verdict:
    """The worst row of one result.

    share    the error as a share of the allowed one: above 1 it is not rounding
    row      its indices: (sequence, head, query or key); (head,) for a sink
    error    the largest of the row
    formula  the same-precision formula's error in this row
    allowed  the largest error that passes
    unjudged  rows that the reference cannot compute
    """

    name: str
    share: float
    row: tuple[int, ...] = ()
    error: float = 0.0
    formula: float = 0.0
    allowed: float = 0.0
    unjudged: int = 0

    @property
    def passes(self) -> bool:
        return self.share <= 1

    def place(self) -> str:
        """The row in words."""
        if self.name == "dsinks":
            return f"head {self.row[0]}"
        if self.name not in RESULTS:
            return f"entry {list(self.row)}"
        of = "key" if self.name in ("dk", "dv") else "query"
        return f"sequence {self.row[0]}, head {self.row[1]}, {of} {self.row[2]}"


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The one with the largest share."""
    return max(verdicts, key=lambda verdict: verdict.share)


class Errors(NamedTuple):
    """For each row of a result: its error, the same-precision formula's error and the expected rounding; and the number
    of elements of all rows."""

    got: Tensor
    formula: Tensor
    expected: Tensor
    elements: int

    def verdict(self, name: str) -> Verdict:
        """The verdict on the result with that name."""
        if self.got.numel() == 0:
            return Verdict(name, 0.0)
        # A row without rounding, such as one that sees no key, must have no error: 0 / 0 counts as 0, x / 0 as inf.
        units = (self.got / self.expected).masked_fill(self.got == 0, 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
        # A row in which the formula overflows is not judged.
        overflows = ~self.formula.isfinite()
        units, formula = units.masked_fill(overflows, 0.0), self.formula.masked_fill(overflows, 0.0)
        formula = (formula / self.expected).masked_fill(formula == 0, 0.0)
        allowed = LIMITS.get(name, GRADIENTS_LIMIT) * max(least(self.elements), formula.max().item())
        worst = int(units.argmax())
        row = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), self.got.shape))
        share, error, other, unit = (x.flatten()[worst].item() for x in (units, self.got, self.formula, self.expected))
        return Verdict(name, share / allowed, row, error, other, unit * allowed)


def judge(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    problem: Problem | Callable[[slice], Problem],
    got: Mapping[str, Tensor | None],
    eps: float | None = None,
) -> list[Verdict]:
    """Judge the results of an implementation for q, do (B, H, T, D) and k, v (B, H_kv, S, D), in the precision of q.

    problem  the problem, or a function that gives it for some query heads; with a function, only the scores of one
             key/value head are in memory at the same time
    got      some of formula.RESULTS, in the shapes of `evaluate`; None fails
    eps      the relative rounding error of products where it is not that of q's precision, as with TF32

    Returns a verdict for each of `got`.
    """
    if isinstance(problem, Problem):
        parts = [references(q, k, v, do, problem, eps)]
    else:
        group, parts = q.shape[1] // k.shape[1], []
        for g in range(k.shape[1]):
            one, heads = slice(g, g + 1), slice(g * group, (g + 1) * group)
            parts.append(references(q[:, heads], k[:, one], v[:, one], do[:, heads], problem(heads), eps))
    return [joined(name, [part[name] for part in parts]).errors(name, x).verdict(name) for name, x in got.items()]


class Reference(NamedTuple):
    """A result of the formula: in fp64, in the inputs' precision with both orders of the keys, and for each row of it
    the rounding to expect."""

    exact: Tensor
    formulas: tuple[Tensor, ...]
    expected: Tensor

    def errors(self, name: str, x: Tensor | None) -> Errors:
        """The errors of an implementation's result x."""
        right, expected = self.exact, self.expected
        if x is not None and x.dtype is torch.float32 and name not in WIDE:  # of calls in fp64 too
            rounded = torch.finfo(torch.float32).eps * right.nan_to_num(neginf=0.0).abs()
            expected = expected + (rounded if right.ndim == expected.ndim else rounded.amax(dim=-1))
        x = torch.full_like(right, math.nan) if x is None else torch.atleast_1d(x).double()
        mine = distance(name, x if x.shape == right.shape else torch.full_like(right, math.nan), right)
        theirs = [distance(name, formula.double(), right) for formula in self.formulas]
        return Errors(mine, torch.stack(theirs).amax(dim=0), expected, right.numel())


def joined(name: str, parts: list[Reference]) -> Reference:
    """The result of all heads, from that of some heads each: the gradient of a formula's tensor is a sum over them."""
    exacts, formulas, expected = zip(*parts, strict=True)
    orders = zip(*formulas, strict=True)
    if name not in RESULTS:
        total = tuple(torch.stack(order).sum(dim=0) for order in orders)
        return Reference(torch.stack(exacts).sum(dim=0), total, torch.stack(expected).square().sum(dim=0).sqrt())
    dim = 0 if name == "dsinks" else 1
    of_heads = tuple(torch.cat(order, dim) for order in orders)
    return Reference(torch.cat(exacts, dim), of_heads, torch.cat(expected, dim))


def references(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem, eps: float | None
) -> dict[str, Reference]:
    """All results of the formula, by name."""
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False), full_precision_products():
        doubles = q.double(), k.double(), v.double(), do.double()
        exact = evaluate(*doubles, problem)
        expected = expected_rounding(*doubles, problem, exact, q.dtype, eps)
        # The order of sums is arbitrary: the larger error of two orders counts for the formula.
        backwards = evaluate(q, k.flip(2), v.flip(2), do, problem.keys_reversed()).results
        backwards |= {name: backwards[name].flip(2) for name in ("dk", "dv")}
        if "dbias" in backwards:
            backwards["dbias"] = backwards["dbias"].flip(-1)
        formulas = [backwards] if q.dtype is torch.float64 else [backwards, evaluate(q, k, v, do, problem).results]
    return {
        name: Reference(right, tuple(results[name] for results in formulas), expected[name])
        for name, right in exact.results.items()
    }


def distance(name: str, x: Tensor, exact: Tensor) -> Tensor:
    """The largest error of each row; not finite where only one of the two is NaN."""
    same = (x == exact) | (x.isnan() & exact.isnan())
    if name == "lse":  # for a row that sees no key, implementations return -inf, inf or the lowest number
        same |= exact == -torch.inf
    error = (x - exact).abs().masked_fill(same, 0.0)
    return error if name == "lse" or exact.ndim == 1 else error.nan_to_num(nan=math.inf).amax(dim=-1)


@contextmanager
def full_precision_products() -> Iterator[None]:
    """fp32 matrix products without TF32, whatever the settings."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Within the block, torch computes with so many threads on a CPU. The bits of sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
