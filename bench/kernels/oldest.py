"""Compiles attention's kernels for GPUs, which this machine need not have, and prints a JSON line for each GPU.

TRITON_INTERPRET=0 python -m bench.kernels.oldest sm_80 sm_90a

    {"gpu": "sm_80", "kernels": 6, "refusal": null}

A launch on tensors in the CPU's memory compiles its kernel to the GPU's machine code and leaves it there. `refusal` is
the first error of Triton, where one of them does not compile; the exit status is then 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention.flash.backward import Gradients
from attention.flash.paths import PATHS
from attention.flash.tiles import rows_like
from bench.kernels.compiler import running
from bench.kernels.plain import calls, dropping

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
}
B, H, T = 1, 2, 4096


@contextmanager
def compiling(target: GPUTarget) -> Iterator[list[str]]:
    """Within this context a launch compiles its kernel for the GPU; the list grows by the kernel's name."""
    compiled: list[str] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(self.fn.__name__)

    with running(target, compile_only):
        yield compiled


def compile_for(name: str) -> dict[str, Any]:
    """The forward and the backward of calls on every path that the GPU has, and their count."""
    asked, refusal = calls(B, H, T), None
    causal, everything = (64, asked["causal"]), (128, dropping(asked["everything"]))
    # On Hopper GPUs the plain kernels differ from those of others by their loads alone.
    launched = [("plain", *causal), ("hopper", *causal), ("hopper", *everything)]
    if name != "sm_90a":
        launched = [("plain", *causal), ("plain", *everything)]
    with compiling(TARGETS[name]) as compiled:
        try:
            for path, D, call in launched:
                q, k, v, out, do, *gradients = (torch.zeros(B, H, T, D, dtype=torch.bfloat16) for _ in range(8))
                PATHS[path].forward(q, k, v, out, call)
                PATHS[path].backward(do, q, k, v, out, rows_like(q), Gradients(*gradients), call)
        except Exception as error:  # of Triton's compiler, whose errors have no common class
            refusal = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
    return {"gpu": name, "kernels": len(compiled), "refusal": refusal}


if __name__ == "__main__":
    reports = []
    for name in sys.argv[1:] or TARGETS:
        reports.append(compile_for(name))
        print(json.dumps(reports[-1]), flush=True)
    sys.exit(any(report["refusal"] for report in reports))
