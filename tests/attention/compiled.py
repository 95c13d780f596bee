"""Compiles the kernels of attention=flash without a GPU, and prints what ptxas says of each as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled [path-capability-head size-mask-dropout ...]

The launch functions are called on tensors in the CPU's memory, and a launch compiles its kernel and leaves it there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
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

# name -> path, compute capability, head size, causal, dropout
CONFIGURATIONS = {
    f"{path}-{capability}-{D}-{'causal' if causal else 'full'}-{'dropout' if dropout else 'exact'}": (
        path,
        capability,
        D,
        causal,
        dropout,
    )
    for path, capability in (("hopper", 90), ("plain", 90), ("plain", 80))
    for D in (64, 128)
    for causal in (True, False)
    for dropout in (0.0, 0.1)
} | {f"fp8-90-{D}-causal-exact": ("fp8", 90, D, True, 0.0) for D in (64, 128)}


def launch(path: str, D: int, causal: bool, dropout: float) -> None:
    """A forward and, where there is one, a backward of 4,096 tokens in bf16."""
    tensors = (torch.zeros(1, 2, 4096, D, dtype=torch.bfloat16) for _ in range(8))
    q, k, v, out, do, *gradients = tensors
    key = DropoutKey(1, 2, 3, 4).pack(q.device) if dropout else None
    extras, options = Extras(key), Options(causal, D**-0.5, drop_threshold(dropout), False)
    PATHS[path].forward(q, k, v, out, extras, options)
    if path != "fp8":
        PATHS[path].backward(do, q, k, v, out, rows_like(q), tuple(gradients), extras, options)


def kernels(capability: int, *configuration: Any) -> list[Any]:
    """What a forward and a backward launch, compiled for a GPU of this compute capability."""
    target, found = GPUTarget("cuda", capability, 32), []

    def run(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        found.append(original(self, *args, warmup=True, **options))

    original = JITFunction.run
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # Triton keeps compiled kernels by device
        get_current_stream=lambda device: 0,
    )
    properties = SimpleNamespace(multi_processor_count=132)
    triton.runtime.driver.set_active(driver)
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(gpu, "capability", return_value=divmod(capability, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        launch(*configuration)
    return found


def ptxas_report(capability: int, kernel: Any) -> dict[str, Any]:
    """Registers, bytes of spilled registers, and warnings about serialised products (C75xx)."""
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(kernel.asm["ptx"])
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={architecture}", ptx, "-o", f"{folder}/cubin"]
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
        path, capability, *configuration = CONFIGURATIONS[name]
        for report in map(partial(ptxas_report, capability), kernels(capability, path, *configuration)):
            print(json.dumps({"name": name, **report}), flush=True)
