"""Compiles the Hopper kernels without a GPU, and prints what ptxas says of each as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled_hopper [configuration ...]

The launch functions are called on tensors in the CPU's memory, and a launch compiles its kernel and leaves it there.
compiled_plain.py does the same for the plain kernels.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    gc.disable()  # the collector would take a third of the imports' time, and 5 to 10% of the rest

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention import DropoutKey, gpu
from attention.dropout import drop_threshold
from attention.flash.configs import Extras, Options
from attention.flash.hopper.configs import HEAD_DIMS
from attention.flash.paths import PATHS
from attention.flash.tiles import rows_like

# At head size 64 the forward has three consumers, or one with tiles of 128 keys, or one with tiles of 64. At head size
# 128 lse2 and delta come with the backward's products, but not for short sequences.
LONG, MIDDLE, SHORT = 16384, 4096, 512
STARTS = torch.zeros(1, LONG, dtype=torch.int32)
SLOPES = SINKS = torch.zeros(2)
HORIZONS = torch.zeros(1, 2, dtype=torch.int32)
SCORES: dict[str, tuple[dict[str, Any], Extras]] = {
    "causal": ({}, Extras()),
    "full": ({"causal": False}, Extras()),
    "documents": ({}, Extras(starts=STARTS, ends=STARTS)),
    "alibi": ({}, Extras(slopes=SLOPES, horizons=HORIZONS)),
    "soft_cap": ({"soft_cap": 50.0}, Extras()),
    "everything": (
        {"window": 1024, "soft_cap": 50.0, "q_start": 3, "k_start": 2},
        Extras(slopes=SLOPES, sinks=SINKS, starts=STARTS, ends=STARTS),
    ),
}
# Each kernel takes two seconds to compile. Head size 128 has the fewest registers to spare, so it has more entries.
EXACT = {64: ("full", "alibi"), 128: ("causal", "alibi", "documents", "soft_cap"), 256: ("causal",)}
DROPOUT = {64: ("causal", "everything"), 128: ("causal", "everything"), 256: ("causal",)}
CONFIGURATIONS: dict[str, tuple[int, str, float, int]] = {
    **{f"{D}-{score}-exact": (D, score, 0.0, LONG) for D, scores in EXACT.items() for score in scores},
    **{f"{D}-{score}-dropout": (D, score, 0.1, LONG) for D, scores in DROPOUT.items() for score in scores},
    "64-causal-exact-middle": (64, "causal", 0.0, MIDDLE),
    "64-causal-dropout-middle": (64, "causal", 0.1, MIDDLE),
    "64-causal-exact-short": (64, "causal", 0.0, SHORT),
    "64-causal-dropout-short": (64, "causal", 0.1, SHORT),
    "128-causal-exact-short": (128, "causal", 0.0, SHORT),
    **{f"{D}-fp8": (D, "fp8", 0.0, LONG) for D in (64, 128)},
}


def launch(D: int, score: str, dropout: float, T: int) -> None:
    """A forward of T tokens in bf16, and a backward where there is one. At head size 64 the backward is the same for
    all lengths, so only long sequences have it."""
    tensors = (torch.zeros(1, 2, T, D, dtype=torch.bfloat16) for _ in range(8))
    q, k, v, out, do, *gradients = tensors
    changed, extras = SCORES.get(score, ({}, Extras()))
    if dropout:
        extras = extras._replace(key=DropoutKey(1, 2, 3, 4).pack(q.device))
    options = Options(causal=True, scale=D**-0.5, threshold=drop_threshold(dropout), tf32=False)._replace(**changed)
    if score == "fp8":
        PATHS["fp8"].forward(q, k, v, out, extras, options)
        return
    PATHS["hopper"].forward(q, k, v, out, extras, options)
    if D in HEAD_DIMS["backward"] and (T == LONG or D > 64):
        PATHS["hopper"].backward(do, q, k, v, out, rows_like(q), tuple(gradients), extras, options)


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

    It has registers, bytes of spilled registers, warnings about serialised products (C75xx), bytes of shared memory,
    and the barriers that overlap other data there.
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
        launch(*CONFIGURATIONS[name])
    for kernel, said in found:
        yield {
            "name": name,
            "kernel": kernel.metadata.name,
            "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
            "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
            "serialised": re.findall(r"\(C75\d+\)[^\n]*", said),
            "shared": kernel.metadata.shared,
            "shared_barriers": shared_barriers(kernel.asm["ptx"]),
        }


if __name__ == "__main__":
    for name in sys.argv[1:] or CONFIGURATIONS:
        for report in reports(name):
            print(json.dumps(report), flush=True)
