"""From a run to the report's verdict: wrong implementations are caught, correct ones pass.

Small runs are trained here step by step, as train.py does, and recipe/compare/ judges them by their folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import attention
from attention import AttentionConfig, AttentionShape, build_attention
from data.batches import Batches, GlobalBatch, eval_batches
from model.gpt import GPT
from model.options import GPTConfig
from recipe.compare.parity import judge
from recipe.compare.runs import find_runs
from recipe.compare.sweeps import cells_of
from recipe.compare.verdict import Outcome, Verdict
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config, as_plain
from recipe.run.metrics import MetricsFile
from recipe.training.device import Precision
from recipe.training.loop import compare
from recipe.training.optimizer import OptimizerConfig, ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.parity_probe import ParityConfig, ParityProbe
from tests.wrong_attention import CLASSES, WRONG

STEPS, B, T = 20, 4, 32
CPU = torch.device("cpu")
Run = Callable[[AttentionConfig, int], Path]


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        for cls in CLASSES:
            patch.setitem(attention.IMPLEMENTATIONS, cls.name, cls)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains an implementation with a seed, unless a test before has, and returns the run's folder."""
    text, folders = tokens(), dict[str, Path]()

    def run(attend: AttentionConfig, seed: int) -> Path:
        config = configured(attend, seed)
        if str(config) not in folders:
            folders[str(config)] = tmp_path_factory.mktemp("run")
            train(config, folders[str(config)], text)
        return folders[str(config)]

    return run


def tokens() -> np.ndarray:
    """Words drawn at random, byte by byte."""
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "whether", "tis", "nobler", "suffer", "slings"]
    text = " ".join(np.random.default_rng(0).choice(words, 6000)).encode()
    return np.frombuffer(text, dtype=np.uint8).copy()


def train(config: Config, folder: Path, tokens: np.ndarray) -> None:
    """A run folder with what the report reads."""
    (folder / ".hydra").mkdir(parents=True)
    torch.manual_seed(config.seed)
    model = GPT(config.model, 256, T, build_attention(config.attention))
    trainer = build_trainer(config, model, CPU, World())
    shape = AttentionShape(
        config.model.n_embd // config.model.n_heads, config.model.n_heads, config.model.n_heads, torch.float32, CPU
    )
    held_out = len(tokens) // 10
    batches = Batches(tokens[:-held_out], T, GlobalBatch(B), config.seed)
    windows = eval_batches(tokens[-held_out:], T, B, 2)
    probe = ParityProbe(config.parity, config.attention, shape)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for step in range(STEPS):
        batch = batches.batch(step, 0)
        measured = compare(probe, trainer, step, batch) if probe.is_due(step) else {}
        loss = float(trainer.update(step, [batch])["train/loss"])
        if (step + 1) % 10 == 0:
            measured["val/loss"] = trainer.evaluate(windows)
        metrics.append(step + 1, {"train/loss": loss, **measured})
    metrics.close()
    summary = {
        "status": "completed",
        "step": STEPS,
        "config": as_plain(config),
        "attention": config.attention.name,
        "precision": "fp32",
        "device": {"type": "cpu", "name": "cpu", "count": 1},
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def configured(attend: AttentionConfig, seed: int) -> Config:
    return Config(
        seed=seed,
        seq_len=T,
        attention=attend,
        model=GPTConfig(n_layers=2, n_heads=2, n_embd=32),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(warmup_steps=5),
        training=TrainingConfig(
            steps=STEPS,
            batch_size=B,
            precision=Precision.fp32,
            log_every=1,
            eval_every=10,
            eval_batches=2,
            checkpoint_every=0,
        ),
        parity=ParityConfig(every=10),
    )


def verdict_on(run: Run, seeds: range, *attends: AttentionConfig) -> Verdict:
    """The verdict on the second of two implementations."""
    runs = find_runs([run(attend, seed) for attend in attends for seed in seeds]).runs
    (verdict,) = judge(cells_of(runs))
    return verdict


@pytest.mark.parametrize("name", WRONG)
def test_the_verdict_catches_a_wrong_implementation(name: str, run: Run):
    wrong = WRONG[name]
    verdict = verdict_on(run, range(1, 4), AttentionConfig(dropout=wrong.dropout), wrong)
    assert verdict.outcome is Outcome.broken
    assert verdict.probe is not None
    assert verdict.probe.ratio > 100


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_verdict_does_not_accuse_a_right_implementation(dropout: float, run: Run):
    tiled = AttentionConfig(name="tiled", block_q=16, block_k=16, dropout=dropout)
    verdict = verdict_on(run, range(4), AttentionConfig(dropout=dropout), tiled)
    assert verdict.outcome is Outcome.holds, verdict
    assert verdict.gaps == ()
