"""On several GPUs the bits are those of one: compiled with a CUDA graph, eager, and sharded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("case", "names"), [("bits", ["replicate"]), ("eager", ["replicate", "shard"])])
def test_losses_norms_and_weights_on_two_gpus_are_those_on_one(case: str, names: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.several_gpus", "--cases", case, "--gpus", "1", "2"]
    done = subprocess.run([*command, "--results", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    (results,) = tmp_path.glob("*.json")
    rows = json.loads(results.read_text())["rows"]
    assert sorted((row["gpus"], row["name"]) for row in rows) == [(n, name) for n in (1, 2) for name in names], (
        done.stderr
    )
    assert len({row["digest"] for row in rows}) == 1
