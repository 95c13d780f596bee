"""Where a step's time goes: a recording of a real step on the CPU."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention import AttentionConfig, build_attention
from model.gpt import GPT
from model.options import GPTConfig
from recipe.run.profiler import Profiler

CPU = torch.device("cpu")


def test_a_run_is_recorded_once_with_the_parts_of_its_steps(tmp_path):
    attend = build_attention(AttentionConfig())
    model = GPT(GPTConfig(n_layers=2), 1000, 64, attend)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(1000, (1, 64))  # few, of many words: no part takes less than a twelfth
    printed: list[str] = []
    profiler = Profiler(
        tmp_path, CPU, profile=True, start=3, steps=10, print=printed.append
    )  # fmt: skip
    assert (profiler.first, profiler.last) == (5, 9)
    for step in range(3, 10):
        if step == profiler.first:
            profiler.start()
        model(tokens, tokens).backward()
        optimizer.step()
        if step == profiler.last:
            profiler.stop()
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert len([e for e in events if e["name"].startswith("Optimizer.step")]) == 5
    assert len([e for e in events if e["name"] == "attention"]) == 2 * 5  # of each layer
    table = (tmp_path / "profile" / "table.txt").read_text()
    assert all(name in table for name in ("attention", "loss", "aten::mm", "Optimizer.step#AdamW.step"))
    assert printed == [
        f"profile: {tmp_path}/profile/table.txt, {tmp_path}/profile/trace.json.gz (open it at ui.perfetto.dev)"
    ]


@pytest.mark.parametrize(("start", "steps", "window"), [(0, 100, (10, 14)), (40, 100, (50, 54)), (0, 3, (0, 2))])
def test_the_steps_recorded_follow_the_warm_up_where_there_are_enough(tmp_path, start, steps, window):
    profiler = Profiler(tmp_path, CPU, profile=True, start=start, steps=steps)
    assert (profiler.first, profiler.last) == window
    unasked = Profiler(tmp_path, CPU, profile=False, start=start, steps=steps)
    assert (unasked.first, unasked.last) == (None, None)


@pytest.mark.usefixtures("forked")
def test_a_profile_prints_nothing_but_where_it_is(tmp_path: Path) -> None:
    script = """
import sys, torch
from pathlib import Path
from recipe.run.profiler import Profiler
cpu = torch.device("cpu")
wanted = dict(profile=True, start=0, steps=1)
profiler = Profiler(Path(sys.argv[1]), cpu, print=lambda line: None, **wanted)
profiler.start()
torch.ones(9).sum()
profiler.stop()
"""
    command, root = [sys.executable, "-c", script, str(tmp_path)], Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
