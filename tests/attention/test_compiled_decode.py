"""The kernels of attend.decode and cache.write without a GPU: what the interpreter cannot run is compiled for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"hopper": 232_448, "older": 101_376}  # bytes of a multiprocessor that a program may have


@pytest.mark.slow
def test_kernels_compile_and_neither_spill_nor_outgrow_the_chip():
    """In a process of its own: Triton decides for its interpreter when it is imported."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.attention.compiled_decode", *SHARED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    kernels = {found.pop("name"): found for found in map(json.loads, run.stdout.splitlines())}
    assert len(kernels) == 12
    for name, found in kernels.items():
        assert found["spilled"] == 0, name
        assert found["shared"] <= SHARED[name.split("-")[0]], name
