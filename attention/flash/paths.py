"""The kernel paths of attention=flash: which kernels compute a call, chosen for its forward and its backward apart.

`attention.path` names one; `auto` takes the first that supports the call and was measured to be faster than plain.
All paths exchange the same log-sum-exp and draw the same mask, so a forward and its backward may take different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gpu
from ..gpu import INTERPRET
from ..interface import UnsupportedAttention
from . import backward as plain_backward
from . import forward as plain_forward
from .configs import FP8_HAS_NO_GRADIENTS, Extras, KernelConfigs, Options, choose, seen_length
from .hopper import backward as hopper_backward
from .hopper import forward as hopper_forward
from .hopper import fp8_forward
from .hopper.configs import (
    FP8_MAX_HEAD_DIM,
    HEAD_DIMS,
    backward_blocks,
    forward_blocks,
    fp8_blocks,
    is_faster,
)


@dataclass(frozen=True)
class Problem:
    """The properties of a call that decide its path.

    features    the FEATURES of Score and Layout that the call asks for
    length      queries or keys of a sequence, the fewer
    capability  of the GPU
    precision   of the products, as AttentionConfig's
    """

    head_dim: int
    dtype: torch.dtype
    features: frozenset[str]
    dropout: bool
    length: int
    capability: tuple[int, int]
    precision: str = "inputs"


class Path(NamedTuple):
    """Kernels for both directions, and the problems that they are for.

    refusal  (problem, backward) -> why that direction does not support the problem, None where it does
    pays     (problem, backward) -> whether that direction was measured to be faster than `plain`
    forward, backward  as those of attention/flash/forward.py and backward.py
    """

    refusal: Callable[[Problem, bool], str | None]
    pays: Callable[[Problem, bool], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Tensor, Extras, Options], tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor | None]


def kernel_configs(q: Tensor, k: Tensor, extras: Extras, options: Options) -> KernelConfigs:
    """The block sizes of the plain kernels for these queries and keys."""
    return choose(q.shape[-1], k.shape[2], q.dtype, gpu.capability(q.device), options, extras)


def hopper_call(q: Tensor, k: Tensor, extras: Extras, options: Options) -> dict[str, Any]:
    """The arguments that decide the tile sizes of the Hopper kernels for these queries and keys."""
    return {
        "head_dim": q.shape[-1],
        "length": seen_length(k.shape[2], options, extras),
        "dropout": options.threshold > 0,
        "alibi": extras.slopes is not None,
        "soft_cap": options.soft_cap is not None,
    }


def describe(q: Tensor, k: Tensor, extras: Extras, options: Options) -> Problem:
    """The problem of a call."""
    asked = {
        "full": not options.causal,
        "window": options.window is not None,
        "soft_cap": options.soft_cap is not None,
        "alibi": extras.slopes is not None,
        "sinks": extras.sinks is not None,
        "documents": extras.starts is not None,
        "offsets": options.q_start is not None,
    }
    features = frozenset(name for name, is_asked in asked.items() if is_asked)
    length, capability = min(q.shape[2], k.shape[2]), gpu.capability(q.device)
    return Problem(q.shape[-1], q.dtype, features, options.threshold > 0, length, capability, options.precision)


def gpu_or_dtype_refusal(problem: Problem) -> str | None:
    """Why no kernel for Hopper supports a problem: another GPU, or inputs that do not have 16 bits."""
    if INTERPRET.value or problem.capability[0] != 9:
        return "needs a GPU of compute capability 9.0 (Hopper)"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 or fp16, not {problem.dtype}"
    return None


def hopper_refusal(problem: Problem, backward: bool) -> str | None:
    """Why the Hopper kernels do not support a problem; None where they do."""
    if refusal := gpu_or_dtype_refusal(problem):
        return refusal
    direction = "backward" if backward else "forward"
    if problem.head_dim not in (sizes := HEAD_DIMS[direction]):
        return f"takes head sizes from {sizes[0]} to {sizes[-1]} in the {direction}, not {problem.head_dim}"
    return None


def fp8_refusal(problem: Problem) -> str | None:
    """Why the Hopper kernel with products in 8 bits does not support a problem; None where it does."""
    if refusal := gpu_or_dtype_refusal(problem):
        return refusal
    if problem.head_dim > FP8_MAX_HEAD_DIM:
        return f"takes head sizes up to {FP8_MAX_HEAD_DIM}, not {problem.head_dim}"
    others = sorted(problem.features - {"full"}) + ["dropout"] * problem.dropout
    return f"does not support {', '.join(others)}" if others else None


def no_backward(*_: Any) -> Tensor | None:
    """Refuse. FlashAttention refuses earlier, in the forward; this is for direct calls of the operators."""
    raise UnsupportedAttention(FP8_HAS_NO_GRADIENTS)


PATHS = {
    "hopper": Path(
        refusal=hopper_refusal,
        pays=lambda problem, backward: is_faster(
            problem.head_dim, problem.dropout, problem.features, problem.length, backward
        ),
        forward=lambda q, k, v, out, extras, options: hopper_forward.forward(
            q, k, v, out, extras, options, forward_blocks(**hopper_call(q, k, extras, options))
        ),
        backward=lambda do, q, k, v, out, lse2, gradients, extras, options: hopper_backward.backward(
            do, q, k, v, out, lse2, gradients, extras, options, backward_blocks(**hopper_call(q, k, extras, options))
        ),
    ),
    "plain": Path(
        refusal=lambda problem, backward: None,
        pays=lambda problem, backward: True,
        forward=lambda q, k, v, out, extras, options: plain_forward.forward(
            q, k, v, out, extras, options, kernel_configs(q, k, extras, options)
        ),
        backward=lambda do, q, k, v, out, lse2, gradients, extras, options: plain_backward.backward(
            do, q, k, v, out, lse2, gradients, extras, options, kernel_configs(q, k, extras, options)
        ),
    ),
    "fp8": Path(  # by attention.precision alone
        refusal=lambda problem, backward: fp8_refusal(problem),
        pays=lambda problem, backward: True,
        forward=lambda q, k, v, out, extras, options: fp8_forward.forward(
            q, k, v, out, options, fp8_blocks(q.shape[-1])
        ),
        backward=no_backward,
    ),
}


def choose_path(name: str, problem: Problem, backward: bool) -> str:
    """The path for a problem in one direction: `name`, or for auto the first that supports it and pays.

    Raises UnsupportedAttention where `name` does not support the problem.
    """
    if problem.precision == "fp8":
        refusal = "has no plain kernels" if name == "plain" else fp8_refusal(problem)
        if refusal is not None:
            raise UnsupportedAttention(f"attention.precision=fp8 {refusal}; choose attention.precision=inputs.")
        return "fp8"
    if name == "auto":
        return next(
            n for n, path in PATHS.items() if path.refusal(problem, backward) is None and path.pays(problem, backward)
        )
    refusal = PATHS[name].refusal(problem, backward)
    if refusal is not None:
        raise UnsupportedAttention(f"attention.path={name} {refusal}; choose attention.path=auto.")
    return name


def describe_path(name: str, problem: Problem) -> str:
    """The paths of both directions, for people: "hopper", or "hopper forward, plain backward"."""
    forward, backward = (choose_path(name, problem, backward) for backward in (False, True))
    return forward if forward == backward else f"{forward} forward, {backward} backward"
