"""On a GPU too, a resumed run is bitwise the run that was never interrupted: compiled or not, in bf16 with dropout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.run.metrics import read_metrics
from recipe.training.checkpoint import load_checkpoint, newest_valid
from tests.equal import assert_equal

ROOT = Path(__file__).parents[2]
OVERRIDES = [
    "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=64", "tracking=disabled", "training.steps=24",
    "model.n_layers=2", "model.n_embd=128", "model.n_heads=2", "model.dropout=0.1", "attention.dropout=0.1",
    "training.batch_size=4", "schedule.warmup_steps=5", "training.log_every=1", "training.eval_every=8",
    "training.eval_batches=2", "training.checkpoint_every=10", "training.keep_last=9", "training.sample_tokens=0",
]  # fmt: skip


@pytest.mark.parametrize(
    "own",
    [
        ["attention=flash", "training.batch_tokens=768"],
        ["attention=flash", "training.compile=true"],  # replayed as a CUDA graph
        [
            "attention=flash",
            "training.compile=true",
            "training.batch_tokens=768",
            "training.recompute=block",
            "optimizer=muon",
            "training.ema=0.9",
        ],
    ],
    ids=" ".join,
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(own, tmp_path):
    def train(*overrides):
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *overrides], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    shutil.copy(os.__file__, tmp_path / "text.txt")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(*OVERRIDES, *own, "hydra.run.dir=whole")
    assert json.loads((whole / "summary.json").read_text())["precision"] == "bf16"
    shutil.copytree(whole, resumed, symlinks=True)
    for later in ("step-00000020", "step-00000024"):
        shutil.rmtree(resumed / "checkpoints" / later)
    train("resume=auto", "hydra.run.dir=resumed")

    lines = [
        [
            (r["step"], r.get("train/loss"), r.get("val/loss"), r.get("val/loss_ema"))
            for r in read_metrics(run / "metrics.jsonl")
        ]
        for run in (whole, resumed)
    ]
    assert lines[0] == lines[1]
    assert_equal(*(load_checkpoint(newest_valid(run / "checkpoints")[0])["model"] for run in (resumed, whole)))
