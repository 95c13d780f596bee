"""Compiles the Hopper kernels without a GPU, and prints what ptxas says of each as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled_hopper [configuration ...]

The launch functions are called on tensors in the CPU's memory, and a launch compiles its kernel and leaves it there.
compiled_plain.py does the same for the plain kernels.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    gc.disable()  # the collector would take a third of the imports' time, and 5 to 10% of the rest

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention import DropoutKey, Score, gpu
from attention.dropout import drop_threshold
from attention.flash.call import HORIZONS_FROM, KernelCall
from attention.flash.hopper.configs import HEAD_DIMS, backward_blocks, forward_blocks
from attention.flash.paths import PATHS
from attention.flash.tiles import rows_like
from attention.spec import Inputs, Spec

LENGTHS = {"": 16384, "-middle": 4096, "-short": 512}  # at some head sizes each has its own shape of blocks
LONGEST = max(LENGTHS.values())
STARTS = torch.zeros(1, LONGEST, dtype=torch.int32)
SLOPES = SINKS = torch.zeros(2)
HORIZONS = torch.zeros(1, 2, dtype=torch.int32)
TOGETHER = Spec(Score(window=1024, soft_cap=50.0, alibi=True, sinks=True), 1.0, documents=True, offsets=True)
SCORES = {
    "causal": KernelCall(Spec(Score(), 1.0), Inputs()),
    "full": KernelCall(Spec(Score(causal=False), 1.0), Inputs()),
    "window": KernelCall(Spec(Score(window=1024), 1.0), Inputs()),
    "wide_window": KernelCall(Spec(Score(window=8192), 1.0), Inputs()),
    "documents": KernelCall(Spec(Score(), 1.0, documents=True), Inputs(starts=STARTS, ends=STARTS)),
    "alibi": KernelCall(Spec(Score(alibi=True), 1.0), Inputs(slopes=SLOPES, horizons=HORIZONS)),
    "soft_cap": KernelCall(Spec(Score(soft_cap=50.0), 1.0), Inputs()),
    "sinks": KernelCall(Spec(Score(sinks=True), 1.0), Inputs(sinks=SINKS)),
    "everything": KernelCall(TOGETHER, Inputs(None, SLOPES, SINKS, STARTS, STARTS), q_start=3, k_start=2),
}


class Configuration(NamedTuple):
    """A call that kernels are compiled for, with T tokens, and the directions that are launched."""

    D: int
    score: str
    dropout: float
    T: int
    directions: tuple[str, ...]
    dtype: torch.dtype = torch.bfloat16


def call_of(D: int, score: str, dropout: float) -> KernelCall:
    """The call with these scores."""
    call = SCORES[score]
    key = DropoutKey(1, 2, 3, 4).pack(torch.device("cpu")) if dropout else None
    spec = call.spec._replace(scale=D**-0.5, threshold=drop_threshold(dropout))
    return call._replace(spec=spec, inputs=call.inputs._replace(key=key))


def shapes(D: int, score: str, dropout: float, T: int) -> dict[str, Any]:
    """The blocks of each direction. Sinks have no backward kernel of their own: it does not read them."""
    q = torch.empty(1, 2, T, D, device="meta")
    problem = call_of(D, score, dropout).problem(q, q)
    found: dict[str, Any] = {"forward": forward_blocks(problem)}
    if D in HEAD_DIMS["backward"] and score != "sinks":
        found["backward"] = backward_blocks(problem)
    return found


def configurations() -> Iterator[tuple[str, Configuration]]:
    """All head sizes, scores and rates, each once for every shape of blocks that the lengths lead to."""
    for D, score, dropout in itertools.product((64, 128, 256), SCORES, (0.0, 0.1)):
        if score == "wide_window" and D > 64:  # the blocks of a narrow one
            continue
        seen = set()
        for suffix, T in LENGTHS.items():
            new = {item for item in shapes(D, score, dropout, T).items() if item not in seen}
            seen |= new
            if new:
                directions = tuple(sorted(direction for direction, _ in new))[::-1]
                rate = "dropout" if dropout else "exact"
                yield f"{D}-{score}-{rate}{suffix}", Configuration(D, score, dropout, T, directions)
    yield (
        "128-causal-exact-fp16",
        Configuration(128, "causal", 0.0, LONGEST, ("forward", "backward"), torch.float16),
    )
    for D in (64, 128):
        yield f"{D}-fp8", Configuration(D, "causal", 0.0, LONGEST, ("fp8",))


CONFIGURATIONS = dict(configurations())


def launch(configuration: Configuration) -> None:
    """The configuration's forward, backward or both."""
    D, score, dropout, T, directions, dtype = configuration
    q, k, v, out, do, *gradients = (torch.zeros(1, 2, T, D, dtype=dtype) for _ in range(8))
    call = call_of(D, score, dropout)
    if T < HORIZONS_FROM:
        call = call._replace(inputs=call.inputs._replace(horizons=None))
    if "fp8" in directions:
        PATHS["fp8"].forward(q, k, v, out, call)
    if "forward" in directions:
        PATHS["hopper"].forward(q, k, v, out, call)
    if "backward" in directions:
        PATHS["hopper"].backward(do, q, k, v, out, rows_like(q), tuple(gradients), call)


def shared_barriers(ptx: str) -> list[int]:
    """Offsets in shared memory at which a kernel initialises a barrier and also stores or loads other data."""
    offsets = {register: int(n) for register, n in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}
    offsets["global_smem"] = 0
    barriers = {offsets.get(register, 0) for register in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", ptx)}
    accesses = re.findall(r"(?:st|ld)\.shared\.\S+\s[^;]*?\[\s*(%r\d+|global_smem)(?:\s*\+\s*(\d+))?\s*\]", ptx)
    others = {offsets[where] + int(n or 0) for where, n in accesses if where in offsets}
    return sorted(barriers & others)


def reports(name: str) -> Iterator[dict[str, Any]]:
    """ptxas's report on the kernels that a configuration launches, compiled for a Hopper GPU.

    It has threads, registers of each, bytes of spilled registers, warnings about serialised products (C75xx), bytes of
    shared memory, and the barriers that overlap other data there.
    """
    target = GPUTarget("cuda", 90, 32)
    found: list[tuple[Any, str]] = []

    def run(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        if self.is_gluon():
            self.device_caches.clear()  # two configurations may share a kernel, which is reported for each
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = original(self, *args, warmup=True, **options)
        if self.is_gluon():  # the others are plain Triton
            found.append((kernel, said.getvalue()))

    original = JITFunction.run
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    properties = SimpleNamespace(multi_processor_count=132)
    triton.runtime.driver.set_active(driver)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(gpu, "capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        mock.patch.object(triton.knobs.compilation, "always_compile", True),  # from the cache there would be no report
    ):
        launch(CONFIGURATIONS[name])
    for kernel, said in found:
        yield {
            "name": name,
            "kernel": kernel.metadata.name,
            "threads": 32 * kernel.metadata.num_warps,
            "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
            "serialised": re.findall(r"\(C75\d+\)[^\n]*", said),
            "shared": kernel.metadata.shared,
            "fused": kernel.metadata.enable_fp_fusion,
            "shared_barriers": shared_barriers(kernel.asm["ptx"]),
        }


if __name__ == "__main__":
    for name in sys.argv[1:] or CONFIGURATIONS:
        for report in reports(name):
            print(json.dumps(report), flush=True)
