"""What Triton's compiler says of kernels for GPUs that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHARED = {"hopper": 232_448, "older": 101_376}  # bytes of a multiprocessor that a program may have


def compiled(script: str, *arguments: str) -> list[dict[str, Any]]:
    """The lines of a script in this folder, which has a process of its own: Triton decides for its interpreter when it
    is imported. Notes of the lines in the source, which change no instruction, would take a tenth of the time."""
    run = subprocess.run(
        [sys.executable, "-m", f"tests.attention.{script}", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]
