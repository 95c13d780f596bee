"""The results of a call, judged by the formula or by another implementation: a slow one that the user names, or, for
attention that does not claim to be softmax attention, itself in its highest precision.

formula.py has neither the values nor the rounding of other attention. Its reference in fp64 has the values, and its
answers to inputs that are changed by one rounding have the errors to expect.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import AttentionError
from .calls import results_of
from .cases import Case, Inputs, draw, problem
from .formula import smallest
from .judge import Reference, Verdict, judge
from .subject import Subject

DRAWS = 4  # of changed inputs
LEAVES = ("q", "k", "v", "sinks", "bias")


class Way(NamedTuple):
    """How a call is made.

    words   where it is not made as usual, in words
    within  the context of its forward pass, as code
    of      the tensors that need a gradient
    eps     as in `judged`
    """

    words: str = ""
    within: str = ""
    of: tuple[str, ...] = LEAVES
    eps: float | None = None


USUAL = Way()


class Refused(Exception):
    """The implementation raised an error instead of computing a case; the message is the error's."""


def short(error: BaseException) -> str:
    """An error on one line, cut where it is long; this library's errors are sentences, and stay whole."""
    if isinstance(error, AttentionError):
        return str(error)
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= 160 else f"{words[:157]}..."


def results(
    subject: Subject, case: Case, inputs: Inputs, gradients: bool = True, way: Way = USUAL
) -> dict[str, Tensor | None]:
    """out, lse and gradients, detached, by the names of formula.RESULTS; None for a gradient that autograd does not
    give. Raises Refused."""
    leaves = {name: x.detach() for name in way.of if (x := getattr(inputs, name)) is not None}
    needed = {f"d{name}": x for name, x in leaves.items()} if gradients else {}
    try:
        with eval(way.within, {"torch": torch}) if way.within else nullcontext():
            values = results_of(lambda: subject(case, replace(inputs, **leaves), lse=True), needed, inputs.do)
    except (Exception, SystemExit) as error:
        if str(error).startswith("CUDA error"):
            raise  # the GPU computes nothing after it
        raise Refused(short(error)) from error
    if "dbias" in values and values["dbias"] is None:
        del values["dbias"]  # a bias is often a constant; a sink is learned
    return values


def verdicts(
    subject: Subject, case: Case, device: torch.device, gradients: bool = True, way: Way = USUAL
) -> list[Verdict]:
    """The judgement of each result of a case. Raises Refused."""
    inputs = draw(case, device)
    return judged(subject, case, inputs, results(subject, case, inputs, gradients, way), eps=way.eps)


def judged(
    subject: Subject,
    case: Case,
    inputs: Inputs,
    got: Mapping[str, Tensor | None],
    keep: Tensor | None = None,
    eps: float | None = None,
) -> list[Verdict]:
    """The judgement of a call's results by the formula, or by the subject's reference.

    keep  the dropout mask, True for kept weights, where the case has dropout
    eps   the relative rounding error of products, where it is not that of the inputs' precision
    """
    reference = subject.standard()
    if reference is None:
        return judge(inputs.q, inputs.k, inputs.v, inputs.do, problem(case, inputs, keep), got, eps)
    return judged_by(reference, case, inputs, got, eps)


def judged_by(
    reference: Subject, case: Case, inputs: Inputs, got: Mapping[str, Tensor | None], eps: float | None
) -> list[Verdict]:
    """The judgement of the results that the reference has too, but for rows in which it overflows. Raises Refused, also
    where all of them do."""
    gradients = any(name.startswith("d") for name in got)
    tensors = {name: x for name in (*LEAVES, "do") if (x := getattr(inputs, name)) is not None}
    rounded = results(reference, case, inputs, gradients)

    def computed(dtype: torch.dtype) -> dict[str, Tensor | None]:
        given = {name: x.to(dtype) for name, x in tensors.items()}
        return results(reference, case, replace(inputs, **given), gradients)

    wide = torch.float64
    try:
        exact = computed(wide)
    except Refused:
        wide = torch.float32
        exact = computed(wide)
    u = (torch.finfo(inputs.q.dtype).eps if eps is None else eps) / 2
    generator = torch.Generator(inputs.q.device).manual_seed(0)
    squares = {name: row_means(name, torch.zeros_like(x)) for name, x in exact.items() if x is not None}
    for _ in range(DRAWS):
        changed = {
            name: x.to(wide) * (1 + u * torch.randn(x.shape, generator=generator, device=x.device, dtype=wide))
            for name, x in tensors.items()
        }
        for name, x in results(reference, case, replace(inputs, **changed), gradients).items():
            right = exact[name]
            if x is not None and right is not None:
                squares[name] += row_means(name, (x - right).square()) / DRAWS
    found, defined = [], False
    for name, x in got.items():
        right, other = exact.get(name), rounded.get(name)
        if right is None or other is None:
            continue
        size = row_means(name, right.square().nan_to_num(posinf=0.0))
        expected = (squares[name].nan_to_num() + u * u * size).sqrt() + smallest(inputs.q.dtype, right.device)
        errors, lost = Reference(right.double(), (other,), expected.double()).errors(name, x), overflows(name, right)
        errors = errors._replace(formula=errors.formula.masked_fill(lost, torch.inf))
        found.append(replace(errors.verdict(name), unjudged=int(lost.sum())))
        defined = defined or not lost.all() or not lost.numel()
    if found and not defined:
        raise Refused(f"{reference.name} is not finite there")
    return found


def overflows(name: str, exact: Tensor) -> Tensor:
    """Whether each row of a reference's result is not finite. The log-sum-exp of no keys is -inf."""
    rows = row_means(name, exact)
    return ~rows.isfinite() & ~((rows == -torch.inf) & (name == "lse"))


def row_means(name: str, x: Tensor) -> Tensor:
    """The mean of each row of a result."""
    return x if name in ("lse", "dsinks") else x.mean(dim=-1)
