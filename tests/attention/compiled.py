"""Compiles the Hopper kernels for sm_90a without a GPU, and prints what ptxas says of each as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled [name ...]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

from attention.flash.hopper.backward import WIDTH, backward_kernel
from attention.flash.hopper.configs import backward_blocks, forward_blocks
from attention.flash.hopper.forward import ROWS, forward_kernel
from attention.flash.hopper.tiles import FP32, TILE

# name -> direction, head size, causal, dropout's threshold, dtype
CONFIGURATIONS = {
    f"{direction}-{D}-{'causal' if causal else 'full'}-{'dropout' if threshold else 'exact'}-{dtype}": (
        direction,
        D,
        causal,
        threshold,
        dtype,
    )
    for direction in ("forward", "backward")
    for D in (64, 128)
    for causal in (True, False)
    for threshold in (0, 26)
    for dtype in ("bf16", "fp16")
}


def descriptor(block: list[int], dtype: str, layout: NVMMASharedLayout) -> str:
    """A tensor descriptor's type as Triton writes it."""
    return f"tensordesc<{dtype}{block},{layout!r}>"


def forward_types(D: int, threshold: int, dtype: str) -> tuple[Any, dict[str, str], int]:
    """The forward's blocks, the types of its arguments, its warps."""
    blocks = forward_blocks(D, threshold > 0)
    types = dict.fromkeys(("H", "G", "T", "S", "n_m", "n_heads", "n_together"), "i32")
    types |= dict.fromkeys(("q", "out"), descriptor([1, 1, ROWS.value, blocks.columns], dtype, TILE))
    types |= dict.fromkeys(("k", "v"), descriptor([1, 1, blocks.k, blocks.columns], dtype, TILE))
    types |= {"p_lse": "*fp32", "p_lse2": "*fp32", "p_work": "*i32", "scale_log2": "fp32"}
    return blocks, types, 4


def backward_types(D: int, threshold: int, dtype: str) -> tuple[Any, dict[str, str], int]:
    """The backward's blocks, the types of its arguments, its warps."""
    blocks = backward_blocks(D)
    types = dict.fromkeys(("H", "G", "T", "S", "n_n", "n_heads", "n_together"), "i32")
    types |= dict.fromkeys(("q", "do", "dq"), descriptor([1, 1, blocks.q, blocks.columns], dtype, TILE))
    types |= dict.fromkeys(("k", "v", "dk", "dv"), descriptor([1, 1, blocks.k, blocks.columns], dtype, TILE))
    types |= dict.fromkeys(("lse2", "delta"), descriptor([1, blocks.q], "fp32", FP32))
    types |= {"dq_sum": descriptor([blocks.q * blocks.columns // WIDTH.value, WIDTH.value], "fp32", FP32)}
    return blocks, types | {"p_turn": "*i32", "p_work": "*i32", "scale": "fp32"}, 8


def ptxas_report(direction: str, D: int, causal: bool, threshold: int, dtype: str) -> dict[str, Any]:
    """Registers, bytes of spilled registers, and warnings about serialised products (C75xx)."""
    kernel = forward_kernel if direction == "forward" else backward_kernel
    blocks, types, warps = (forward_types if direction == "forward" else backward_types)(D, threshold, dtype)
    constants: dict[str, Any] = {"CAUSAL": causal, "THRESHOLD": threshold, "BLOCKS": blocks}
    if threshold:
        types["p_key"] = "*i64"
    else:
        constants["p_key"] = None
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = GluonASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx, "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", said))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        "serialised": re.findall(r"\(C75\d+\)[^\n]*", said),
        "shared": compiled.metadata.shared,
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or CONFIGURATIONS:
        print(json.dumps({"name": name, **ptxas_report(*CONFIGURATIONS[name])}), flush=True)
