"""One attention problem in slow memory, solved by any of the functions of flash.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention import DropoutKey, keep_mask
from attention.dropout import keep_scale
from learn.flash import (
    block_sizes,
    flash_1_backward,
    flash_1_forward,
    flash_2_backward,
    flash_2_forward,
    lowest,
    standard_backward,
    standard_forward,
)
from learn.memory import Slow, SlowMemory, Traffic

Function = Callable[..., None]  # slow memory, sizes, masks; leaves its results in slow memory
FORWARD: dict[str, Function] = {"standard": standard_forward, "flash_1": flash_1_forward, "flash_2": flash_2_forward}
BACKWARD: dict[str, Function] = {
    "standard": standard_backward,
    "flash_1": flash_1_backward,
    "flash_2": flash_2_backward,
}


@dataclass(frozen=True)
class Problem:
    """N queries and keys of d numbers, a fast memory of M numbers, and a mask.

    causal   query i sees key j iff j <= i
    window   a query sees its last `window` keys, itself included; 0: all
    dropout  probability of dropping a weight, by the mask that every implementation of attention/ draws
    """

    N: int = 5
    d: int = 3
    M: int = 59
    causal: bool = False
    window: int = 0
    dropout: float = 0.0

    def visible(self) -> Tensor:
        """(N, N) bool."""
        i, j = torch.arange(self.N)[:, None], torch.arange(self.N)[None, :]
        visible = torch.ones(self.N, self.N, dtype=torch.bool)
        if self.causal:
            visible &= j <= i
        if self.window:
            visible &= (j <= i) & (j > i - self.window)
        return visible

    def dropout_factors(self) -> Tensor:
        """(N, N): 0 where dropout drops a weight, else the factor by which it scales the others."""
        if not self.dropout:
            return torch.ones(self.N, self.N)
        mask = keep_mask(DropoutKey(0, 0, 0, 0), self.dropout, 1, 1, self.N, self.N)[0, 0]
        return mask * keep_scale(self.dropout)

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and the output's gradient, (N, d) each: the same numbers every time."""
        generator = torch.Generator().manual_seed(self.N * 100 + self.d)
        return tuple(torch.randn(self.N, self.d, generator=generator) for _ in range(4))


@dataclass
class Pass:
    """One pass of an algorithm: a function, its arguments, and the slow memory that it works in.

    traffic  numbers that it moves
    before   those of the forward pass that a backward needs, which `traffic` does not count
    """

    function: Function
    slow: SlowMemory
    arguments: dict[str, Any]
    traffic: Traffic
    before: Traffic

    def __getitem__(self, name: str) -> Tensor:
        return self.slow[name].tensor


def prepared(problem: Problem, algorithm: str, backward: bool, blocks: tuple[int, int] | None = None) -> Pass:
    """A pass of an algorithm that has not run; a backward's forward has.

    blocks  B_r and B_c; by default those that `block_sizes` gives for M
    """
    q, k, v, do = problem.inputs()
    N, d = q.shape
    before = Traffic()
    if backward:
        forward = solve(problem, algorithm, blocks=blocks)
        before = forward.traffic
        tensors = {name: matrix.tensor for name, matrix in forward.slow.items()}
        tensors |= {"dO": do} | {name: torch.zeros(N, d) for name in ("dQ", "dK", "dV")}
        if algorithm == "standard":
            tensors["dS"] = torch.zeros(N, N)
            del tensors["O"], tensors["S"]
        if algorithm == "flash_2":
            tensors["D"] = torch.zeros(N, 1)
    else:
        tensors = {"Q": q, "K": k, "V": v, "O": torch.zeros(N, d)}
        tensors |= {  # what the backward pass needs
            "standard": {"S": torch.zeros(N, N), "P": torch.zeros(N, N)},
            "flash_1": {"l": torch.zeros(N, 1), "m": torch.full((N, 1), lowest(q.dtype))},
            "flash_2": {"lse": torch.zeros(N, 1)},
        }[algorithm]
    traffic, see, keep = Traffic(), problem.visible(), problem.dropout_factors()
    slow = SlowMemory({name: Slow(tensor, traffic) for name, tensor in tensors.items()})
    arguments = {"hbm": slow, "see": lambda i, j: see[i, j], "keep": lambda i, j: keep[i, j]}
    if algorithm != "standard":
        arguments["B_r"], arguments["B_c"] = blocks or block_sizes(d, problem.M)
    return Pass((BACKWARD if backward else FORWARD)[algorithm], slow, arguments, traffic, before)


def solve(problem: Problem, algorithm: str, *, backward: bool = False, blocks: tuple[int, int] | None = None) -> Pass:
    """Run one pass of an algorithm and count its traffic."""
    ready = prepared(problem, algorithm, backward, blocks)
    ready.function(**ready.arguments)
    return ready
