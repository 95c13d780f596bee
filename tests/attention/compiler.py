"""What Triton's compiler reports on kernels, for GPUs that this machine need not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = {"hopper": 232_448, "older": 101_376}  # bytes of a multiprocessor that a program may have


def compiled(script: str, *arguments: str) -> list[dict[str, Any]]:
    """The output lines of a script in this folder, without line information, which takes a tenth of the time.

    The script has its own process, because Triton chooses between compiler and interpreter when it is imported. It has
    its own cache, because replacing kernels in an older one waits for the disk. What a launch leaves to Triton is
    compiled without fused products and sums, as it will be from Triton 3.10 on.
    """
    options = {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, "-m", f"tests.attention.{script}", *arguments],
            cwd=ROOT,
            env=os.environ | options | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
