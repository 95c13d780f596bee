"""Launches of the Hopper kernels: all head sizes, kinds of score and rates, each for every shape of blocks."""

import itertools
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import torch

from attention import DropoutKey, Score
from attention.dropout import drop_threshold
from attention.flash.backward import Gradients
from attention.flash.call import HORIZONS_FROM, KernelCall
from attention.flash.hopper.configs import backward_blocks, forward_blocks
from attention.flash.paths import PATHS
from attention.flash.tiles import rows_like
from attention.spec import Inputs
from bench.kernels.compiler import Launch
from bench.kernels.plain import CAUSAL, calls

LENGTHS = {"": 16384, "-middle": 4096, "-short": 512}  # at some head sizes each has a different shape of blocks
LONGEST = max(LENGTHS.values())
BOTH = ("forward", "backward")


def launches() -> Iterator[Launch]:
    """The launches for every shape of blocks that some length selects."""
    asked = calls(1, 2, LONGEST)
    asked["steep"] = KernelCall(CAUSAL._replace(factors="fixed"), Inputs(factors=torch.ones(1, 1, 1)))
    for D, (kind, call), dropout in itertools.product((64, 128, 256), asked.items(), (0.0, 0.1)):
        if kind == "wide_window" and D > 64:  # the blocks of a narrow one
            continue
        seen: set[Any] = set()
        for suffix, T in LENGTHS.items():
            problem = with_options(call, D, T, dropout)
            new = {item for item in shapes(problem, D, T).items() if item not in seen}
            seen |= new
            if new:
                name = f"attention/hopper/{D}-{kind}-{'dropout' if dropout else 'exact'}{suffix}"
                yield Launch(name, partial(launch, problem, D, T, {direction for direction, _ in new}))
    for D in (128, 256):
        call = with_options(asked["causal"], D, LONGEST, 0.0)
        yield Launch(f"attention/hopper/{D}-causal-exact-fp16", partial(launch, call, D, LONGEST, BOTH, torch.float16))


def with_options(call: KernelCall, D: int, T: int, dropout: float) -> KernelCall:
    """A call for heads of size D and T tokens, with dropout."""
    key = DropoutKey(1, 2, 3, 4).pack(torch.device("cpu")) if dropout else None
    horizons = call.inputs.horizons if T >= HORIZONS_FROM else None
    spec = call.spec._replace(scale=D**-0.5, threshold=drop_threshold(dropout))
    return call._replace(spec=spec, inputs=call.inputs._replace(key=key, horizons=horizons))


def shapes(call: KernelCall, D: int, T: int) -> dict[str, Any]:
    """The blocks of each direction. Sinks need no separate backward kernel, because the backward does not read them."""
    q = torch.empty(1, 2, T, D, device="meta")
    problem = call.problem(q, q)
    blocks: dict[str, Any] = {"forward": forward_blocks(problem)}
    if call.spec.score != Score(sinks=True):
        blocks["backward"] = backward_blocks(problem)
    return blocks


def launch(
    call: KernelCall,
    D: int,
    T: int,
    directions: Collection[str],
    dtype: torch.dtype = torch.bfloat16,
    path: str = "hopper",
) -> None:
    """The kernels of these directions, "forward" or "backward", on a path of attention=flash."""
    q, k, v, out, do, *gradients = (torch.empty(1, 2, T, D, dtype=dtype) for _ in range(8))
    if "forward" in directions:
        PATHS[path].forward(q, k, v, out, call)
    if "backward" in directions:
        PATHS[path].backward(do, q, k, v, out, rows_like(q), Gradients(*gradients), call)
