"""Compiles the plain Triton kernels without a GPU, and prints what each takes as a line of JSON.

TRITON_INTERPRET=0 python -m tests.attention.compiled_plain resources hopper older
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    gc.disable()  # the collector would take a third of the imports' time, and 5 to 10% of the rest

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attention import Score, UnsupportedAttention, gpu
from attention.flash import configs
from attention.flash.backward import Tensors, launch_dkdv, launch_dq
from attention.flash.call import KernelCall
from attention.flash.call import Problem as CallProblem
from attention.flash.configs import ConfigKey
from attention.flash.forward import forward
from attention.flash.op import check_backward
from attention.flash.tiles import rows_like
from attention.spec import Inputs, Spec

CAPABILITIES = {"hopper": (9, 0), "older": (8, 0)}
PLAIN = Spec(Score(), scale=0.125)
B, H, H_KV, T = 2, 4, 2, 100


class Problem(NamedTuple):
    """A configuration that the kernels are compiled for."""

    name: str
    key: ConfigKey
    call: KernelCall
    dtype: torch.dtype


def problems(architecture: str) -> Iterator[Problem]:
    """All of the architecture's table entries, and every head size with every kind of score and rate.

    In fp32 a head size has one entry for all of them, which is compiled with everything at once.
    """
    slopes, documents = torch.zeros(H), torch.zeros(B, T, dtype=torch.int32)
    horizons = torch.zeros(B, H, dtype=torch.int32)
    together = Spec(Score(window=1024, soft_cap=50.0, alibi=True, sinks=True), 0.125, documents=True, offsets=True)
    asked = {
        "causal": KernelCall(PLAIN, Inputs()),
        "full": KernelCall(PLAIN._replace(score=Score(causal=False)), Inputs()),
        "window": KernelCall(PLAIN._replace(score=Score(window=1024)), Inputs()),
        "documents": KernelCall(PLAIN._replace(documents=True), Inputs(starts=documents, ends=documents)),
        "alibi": KernelCall(PLAIN._replace(score=Score(alibi=True)), Inputs(slopes=slopes, horizons=horizons)),
        "soft_cap": KernelCall(PLAIN._replace(score=Score(soft_cap=50.0)), Inputs()),
        "sinks": KernelCall(PLAIN._replace(score=Score(sinks=True)), Inputs(sinks=slopes)),
        "everything": KernelCall(together, Inputs(None, slopes, slopes, documents, documents), q_start=3, k_start=2),
    }

    def problem(kind: str, key: ConfigKey, dtype: torch.dtype = torch.bfloat16) -> Problem:
        call, rate = asked[kind], "dropout" if key.dropout else "exact"
        if key.dropout:
            inputs = call.inputs._replace(key=torch.zeros(7, dtype=torch.int64))
            call = call._replace(spec=call.spec._replace(threshold=26), inputs=inputs)
        label = kind if dtype == torch.bfloat16 else f"{kind}-{str(dtype).removeprefix('torch.')}"
        return Problem(f"{architecture}-{label}-{key.head_dim}-{rate}-{key.length:g}", key, call, dtype)

    for key in configs.TABLES[architecture]:
        yield problem("causal", key)
    for head_dim, dropout in itertools.product((64, 128, 256), (False, True)):
        for kind in asked:
            if kind != "causal":
                yield problem(kind, ConfigKey(head_dim, dropout))
        if dropout:
            yield problem("everything", ConfigKey(head_dim, dropout), torch.float32)
    yield problem("causal", ConfigKey(64, True), torch.float16)


class NoGPU:
    """Stands in for Triton's driver."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.arch = 10 * capability[0] + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(kernel: Any) -> dict[str, int]:
    """Registers per thread, bytes of registers spilled per thread, and bytes of shared memory per program.

    And whether products and sums are fused.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return {
        "registers": int(found[1]),
        "spilled": int(found[2]),
        "shared": kernel.metadata.shared,
        "fused": kernel.metadata.enable_fp_fusion,
    }


class Compiled(NamedTuple):
    """A kernel that a launch compiled, and ptxas's warnings that it makes products wait for each other (C75xx)."""

    name: str
    kernel: Any
    serialised: list[str]


@contextlib.contextmanager
def compiling(architecture: str) -> Iterator[list[Compiled]]:
    """Within this context launches compile for the architecture and run nothing; each appends to the list."""
    triton.runtime.driver.set_active(NoGPU(CAPABILITIES[architecture]))
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        serialised = re.findall(r"\(C75\d+\)[^\n]*", said.getvalue())
        compiled.append(Compiled(self.fn.__name__.removesuffix("_kernel"), kernel, serialised))

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(gpu, "capability", return_value=CAPABILITIES[architecture]),
        mock.patch.object(triton.knobs.nvidia, "dump_ptxas_log", True),
        mock.patch.object(triton.knobs.compilation, "always_compile", True),  # from the cache there would be no report
    ):
        yield compiled


def launch(architecture: str, key: ConfigKey, call: KernelCall, dtype: torch.dtype, T: int, S: int) -> None:
    """A forward with the blocks chosen for `key`, and a backward where the GPU has one. That does not read sinks."""

    def tensor(heads: int, length: int) -> Tensor:
        return torch.zeros(B, length, heads, key.head_dim, dtype=dtype).transpose(1, 2)

    q, k, v, do, out = (tensor(*size) for size in ((H, T), (H_KV, S), (H_KV, S), (H, T), (H, T)))
    length = int(min(key.length, 2**20))
    blocks = configs.choose(CallProblem(call.spec, key.head_dim, dtype, length, length, CAPABILITIES[architecture]))
    _, lse2 = forward(q, k, v, out, call, blocks.forward)
    score = replace(call.spec.score, sinks=False)
    call = call._replace(spec=call.spec._replace(score=score), inputs=call.inputs._replace(sinks=None))
    try:
        check_backward(key.head_dim, dtype, q.device)
    except UnsupportedAttention:
        return
    x = Tensors(q, k, v, out, do, lse2, rows_like(q), tensor(H, T), tensor(H_KV, S), tensor(H_KV, S))
    launch_dq(x, call, blocks.dq)
    launch_dkdv(x, call, blocks.dkdv)


def compile_all(architecture: str) -> Iterator[dict[str, Any]]:
    """Resources of each problem's kernels, compiled by the same launches as on a GPU."""
    with compiling(architecture) as compiled:
        for name, key, call, dtype in problems(architecture):
            compiled.clear()
            launch(architecture, key, call, dtype, T, T)
            for found in compiled:
                yield {"name": f"{name}-{found.name}", "serialised": found.serialised} | resources(found.kernel)


def compile_lengths(architecture: str) -> Iterator[dict[str, Any]]:
    """Number of kernels compiled for lengths that Triton specialises by default: 1, multiples of 16 and others.

    The positions change too, and with the lengths the number of heads that run at the same time.
    """
    lengths = (1, 16, 17, 48, 100)
    found: dict[str, set[str]] = {}
    with compiling(architecture) as compiled:
        for n, (T, S) in enumerate(itertools.product(lengths, lengths)):
            call = KernelCall(PLAIN._replace(offsets=True), Inputs(), q_start=n - 1, k_start=16 * (n % 2))
            launch(architecture, ConfigKey(64, False, 128), call, torch.bfloat16, T, S)
        for launched in compiled:
            found.setdefault(launched.name, set()).add(launched.kernel.hash)
    yield {name: len(kernels) for name, kernels in found.items()}


if __name__ == "__main__":
    what, *architectures = sys.argv[1:]
    for architecture in architectures:
        for line in {"resources": compile_all, "lengths": compile_lengths}[what](architecture):
            print(json.dumps(line), flush=True)
