"""The kernel paths of attention=flash: which kernels compute a call, chosen separately for forward and backward.

`attention.path` names one; `auto` takes the first that supports the call and was measured to be faster than plain.
All paths exchange the same log-sum-exp and draw the same mask, so a forward and its backward may take different ones.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Option, UnsupportedAttention
from ..gpu import INTERPRET
from . import backward as plain_backward
from . import forward as plain_forward
from .call import KernelCall, Problem
from .hopper import backward as hopper_backward
from .hopper import forward as hopper_forward
from .hopper.configs import HEAD_DIMS, MAX_HEAD_DIM_OF_SUMS, is_faster


class Path(NamedTuple):
    """Kernels for both directions, and the problems that they are for.

    refusal  (problem, backward) -> why that direction does not support the problem, None where it does
    pays     (problem, backward) -> whether that direction was measured to be faster than `plain`
    forward, backward  functions as attention/flash/forward.py and backward.py have them
    """

    refusal: Callable[[Problem, bool], str | None]
    pays: Callable[[Problem, bool], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Tensor, KernelCall], tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor | None]


def hopper_refusal(problem: Problem, backward: bool) -> str | None:
    """Why the Hopper kernels do not support a problem; None where they do."""
    if INTERPRET.value or problem.capability[0] != 9:
        return "needs a GPU of compute capability 9.0 (Hopper)"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 or fp16, not {problem.dtype}"
    if problem.head_dim not in HEAD_DIMS:
        return f"takes head sizes from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, not {problem.head_dim}"
    if backward and problem.head_dim > MAX_HEAD_DIM_OF_SUMS:
        lacks = ["formulas"] * (problem.spec.score.formula is not None) + ["learned slopes"] * problem.spec.slopes
        if lacks:
            return f"has no gradients of {lacks[0]} at head sizes above {MAX_HEAD_DIM_OF_SUMS}"
    return None


def fp8_refusal(problem: Problem) -> str | None:
    """Why products in 8 bits do not support a problem; None where they do."""
    if problem.capability < (8, 9):
        return "needs a GPU of compute capability 8.9 (Ada) or newer"
    if problem.spec.path == "hopper":
        return "has no kernels for Hopper of its own"
    others = sorted(problem.spec.features() - {"full"}) + ["dropout"] * problem.dropout
    return f"does not support {', '.join(others)}" if others else None


def refused(option: str, chosen: str, why: str, instead: str) -> UnsupportedAttention:
    """The refusal of a choice."""
    options = (Option(f"attention.{option}", choice) for choice in (chosen, instead))
    return UnsupportedAttention(f"{{}} {why}; choose {{}}.", *options)


def no_fp8_gradients() -> UnsupportedAttention:
    """The refusal of a backward with products in 8 bits."""
    fp8, inputs = (Option("attention.precision", precision) for precision in ("fp8", "inputs"))
    return UnsupportedAttention("{} is for evaluation and inference, and has no gradients; train with {}.", fp8, inputs)


PATHS = {
    "hopper": Path(
        refusal=hopper_refusal, pays=is_faster, forward=hopper_forward.forward, backward=hopper_backward.backward
    ),
    "plain": Path(
        refusal=lambda problem, backward: None,
        pays=lambda problem, backward: True,
        forward=plain_forward.forward,
        backward=plain_backward.backward,
    ),
}


@lru_cache(maxsize=4096)
def choose_path(problem: Problem, backward: bool) -> str:
    """The path for a problem in one direction: its spec's, or for auto the first that supports it and pays.

    Raises UnsupportedAttention where the spec's path does not support the problem.
    """
    name = problem.spec.path
    if problem.spec.precision == "fp8":
        if backward:
            raise no_fp8_gradients()
        if refusal := fp8_refusal(problem):
            raise refused("precision", "fp8", refusal, "inputs")
        return "plain"
    if name == "auto":
        return next(
            n for n, path in PATHS.items() if path.refusal(problem, backward) is None and path.pays(problem, backward)
        )
    refusal = PATHS[name].refusal(problem, backward)
    if refusal is not None:
        raise refused("path", name, refusal, "auto")
    return name


def describe_path(problem: Problem) -> str:
    """The paths of both directions, for people: "hopper", or "hopper forward, plain backward"; "fp8" has one."""
    if problem.spec.precision == "fp8":
        choose_path(problem, backward=False)
        return "fp8"
    forward, backward = (choose_path(problem, backward) for backward in (False, True))
    return forward if forward == backward else f"{forward} forward, {backward} backward"
