"""Triton's interpreter, in which kernels run where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[1]
INTERPRETED = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled for the GPU")


def run_interpreted(script: str) -> None:
    """Run a script with Triton's interpreter: here if this process interprets kernels, else in a new process."""
    if triton.knobs.runtime.interpret:
        exec(script, {})
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
