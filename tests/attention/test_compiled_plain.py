"""The plain Triton kernels without a GPU: what the interpreter cannot run is compiled for one, and does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"hopper": 232_448, "older": 101_376}  # bytes of a multiprocessor that a program may have
# Bytes of registers that a thread spills, with Triton 3.6 and 3.7, whichever is more. All other kernels spill none.
SPILLED = {
    "hopper-causal-64-dropout-2048-dkdv": 88,
    "hopper-causal-64-dropout-8192-dkdv": 104,
    "hopper-causal-64-dropout-inf-dq": 80,
    "hopper-causal-64-dropout-inf-dkdv": 104,
    "hopper-causal-128-exact-512-dq": 96,
    "hopper-causal-128-exact-2048-dq": 96,
    "hopper-causal-128-dropout-2048-dkdv": 8,
    "hopper-causal-128-dropout-inf-dkdv": 8,
    "hopper-full-64-dropout-inf-dq": 56,
    "hopper-full-64-dropout-inf-dkdv": 96,
    "hopper-alibi-64-exact-inf-forward": 24,
    "hopper-alibi-64-exact-inf-dkdv": 88,
    "hopper-alibi-64-dropout-inf-dkdv": 120,
    "hopper-soft_cap-128-exact-inf-dkdv": 64,
    "older-causal-64-exact-inf-dkdv": 32,
    "older-causal-64-dropout-inf-dkdv": 88,
    "older-causal-128-exact-inf-dkdv": 24,
    "older-full-64-exact-inf-dkdv": 8,
    "older-everything-64-exact-inf-dkdv": 144,
    "older-everything-64-dropout-inf-dq": 32,
    "older-everything-64-dropout-inf-dkdv": 288,
}


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """The lines of compiled_plain.py, in a process of its own: Triton decides for its interpreter when imported."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.attention.compiled_plain", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ["hopper", "older"])
def test_kernels_compile_and_neither_spill_more_nor_outgrow_the_chip(architecture):
    kernels = {found.pop("name"): found for found in compiled("resources", architecture)}
    assert {name for name in SPILLED if name.startswith(architecture)} <= set(kernels)
    too_much = {
        name: found
        for name, found in kernels.items()
        if found["spilled"] > SPILLED.get(name, 0) or found["shared"] > SHARED[architecture]
    }
    assert not too_much


@pytest.mark.slow
def test_no_length_and_no_position_compiles_a_kernel_anew():
    assert compiled("lengths", "hopper") == [{"forward": 1, "dq": 1, "dkdv": 1}]
