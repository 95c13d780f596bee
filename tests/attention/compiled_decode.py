"""Compiles the kernels of attend.decode and cache.write without a GPU, and prints what each takes as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled_decode hopper older
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    gc.disable()  # the collector would take a third of the imports' time, and 5 to 10% of the rest

import torch
import triton
from triton.runtime.jit import JITFunction

from attention import Cache, Score, gpu
from attention.decode import write_kernel
from attention.flash.decode import run_decode
from attention.spec import Spec
from tests.attention.compiled_plain import CAPABILITIES, NoGPU, resources

B, H, H_KV, T, D, CAPACITY = 2, 8, 2, 3, 128, 4096
# The dtype and the page size; None: contiguous.
CACHES = {
    "hopper": ((torch.bfloat16, None), (torch.bfloat16, 16)),
    "older": ((torch.bfloat16, 16), (torch.float32, 256)),
}


def launches(dtype: torch.dtype, size: int | None) -> None:
    """Append three tokens to a cache and attend to it: paged with every score option, or contiguous with none."""
    pages = None if size is None else torch.zeros(B, CAPACITY // size, dtype=torch.int32)
    k = torch.zeros(B if size is None else B * CAPACITY // size, H_KV, size or CAPACITY, D, dtype=dtype)
    cache = Cache(k, k.clone(), torch.zeros(B, dtype=torch.int32), pages)
    q, new = torch.zeros(B, H, T, D, dtype=dtype), torch.zeros(B, H_KV, T, D, dtype=dtype)
    write_kernel.write(*cache, new, new, None if size is None else torch.zeros(B + 1, dtype=torch.int64))
    per_head = None if size is None else torch.zeros(H)
    score = Score() if size is None else Score(window=1024, soft_cap=50.0, alibi=True, sinks=True)
    run_decode(q, [*cache], [] if per_head is None else [per_head, per_head], Spec(score, scale=0.125).text())


def compile_all(architecture: str) -> Iterator[dict[str, Any]]:
    """Resources of the kernels, compiled by the same launches as on a GPU."""
    capability = CAPABILITIES[architecture]
    gpu.capability = lambda device: capability
    triton.runtime.driver.set_active(NoGPU(capability))
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs) -> None:
        compiled.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **kwargs)))

    JITFunction.run = compile_only
    for dtype, size in CACHES[architecture]:
        compiled.clear()
        launches(dtype, size)
        for name, kernel in compiled:
            yield {"name": f"{architecture}-{dtype}-{size}-{name}"} | resources(kernel)
    JITFunction.run = run


if __name__ == "__main__":
    for architecture in sys.argv[1:]:
        for line in compile_all(architecture):
            print(json.dumps(line), flush=True)
