"""Compiles the Hopper kernels without a GPU, and prints what ptxas says of each as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled_hopper [head size-score-dropout ...]

The launch functions are called on tensors in the CPU's memory, and a launch compiles its kernel and leaves it there.
compiled_plain.py does the same for the plain kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention import DropoutKey, gpu
from attention.dropout import drop_threshold
from attention.flash.configs import Extras, Options
from attention.flash.paths import PATHS
from attention.flash.tiles import rows_like

T = 4096
STARTS = torch.zeros(1, T, dtype=torch.int32)
SLOPES = SINKS = torch.zeros(2)
SCORES: dict[str, tuple[dict[str, Any], Extras]] = {
    "causal": ({}, Extras()),
    "full": ({"causal": False}, Extras()),
    "window": ({"window": 1024}, Extras()),
    "documents": ({}, Extras(starts=STARTS, ends=STARTS)),
    "alibi": ({}, Extras(slopes=SLOPES)),
    "soft_cap": ({"soft_cap": 50.0}, Extras()),
    "everything": (
        {"window": 1024, "soft_cap": 50.0, "q_start": 3, "k_start": 2},
        Extras(slopes=SLOPES, sinks=SINKS, starts=STARTS, ends=STARTS),
    ),
}
# Whatever takes registers of its own, by itself, and all of it at once; dropout with the scores that it meets most.
CONFIGURATIONS = {
    f"{D}-{score}-{'dropout' if dropout else 'exact'}": (D, score, dropout)
    for D in (64, 128)
    for score in SCORES
    for dropout in ((0.0, 0.1) if score == "causal" else (0.1,) if score == "everything" else (0.0,))
} | {f"{D}-fp8": (D, "fp8", 0.0) for D in (64, 128)}


def launch(D: int, score: str, dropout: float) -> None:
    """A forward and, where there is one, a backward of 4,096 tokens in bf16."""
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
    PATHS["hopper"].backward(do, q, k, v, out, rows_like(q), tuple(gradients), extras, options)


def kernels(*configuration: Any) -> list[Any]:
    """What a forward and a backward launch, compiled for a Hopper GPU."""
    target, found = GPUTarget("cuda", 90, 32), []

    def run(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        kernel = original(self, *args, warmup=True, **options)
        if self.is_gluon():  # the others are plain Triton
            found.append(kernel)

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
    ):
        launch(*configuration)
    return found


def ptxas_report(kernel: Any) -> dict[str, Any]:
    """Registers, bytes of spilled registers, and warnings about serialised products (C75xx)."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(kernel.asm["ptx"])
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx, "-o", f"{folder}/cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": kernel.metadata.name,
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "serialised": re.findall(r"\(C75\d+\)[^\n]*", said),
        "shared": kernel.metadata.shared,
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or CONFIGURATIONS:
        for report in map(ptxas_report, kernels(*CONFIGURATIONS[name])):
            print(json.dumps({"name": name, **report}), flush=True)
