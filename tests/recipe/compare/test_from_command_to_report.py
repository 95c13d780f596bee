"""An arena from its command to its report, with real runs: interrupted and continued."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = [
    "experiment=arena", "arena.arms=causal: score=causal | near: score=alibi", "arena.rules.lr=[]",
    "arena.seeds=2", "data=text", "data.path=text.txt", "data.cache=cache", "device=cpu", "tracking=disabled",
    "seq_len=16", "model.n_layers=1", "model.n_heads=2", "model.n_embd=16", "training.steps=4",
    "training.eval_every=2", "training.eval_batches=1",
]  # fmt: skip


def train(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train.py"), *COMMAND, *overrides]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def compare(folder: Path) -> str:
    command = [sys.executable, str(ROOT / "compare.py"), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.timeout(600)
def test_an_arena_is_interrupted_continued_and_reported(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    first = train(tmp_path)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("multirun/*/*/1/metrics.jsonl")):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    first.send_signal(signal.SIGINT)
    printed, _ = first.communicate(timeout=100)
    assert first.returncode == 130
    assert "[1/4]  causal, seed 1" in printed
    assert " left" in printed
    (sweep,) = tmp_path.glob("multirun/*/*")
    done = json.loads((sweep / "0" / "summary.json").read_text())
    assert done["status"] == "completed"
    assert "undecided" in compare(sweep)

    again = train(tmp_path, f"hydra.sweep.dir={sweep}")
    printed, _ = again.communicate(timeout=400)
    assert again.returncode == 0, printed
    assert len(list(tmp_path.glob("multirun/*/*"))) == 1
    assert json.loads((sweep / "0" / "summary.json").read_text()) == done
    assert "[4/4]  near, seed 2: loss" in printed

    assert "(2 seeds)" in compare(sweep)
    results = json.loads((sweep / "report" / "arena.json").read_text())
    assert len(results["losses"]["near"]) == 2
    assert all(run["attention_ms"] > 0 for run in map(summary, sorted(sweep.glob("[0-9]*"))))


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())
