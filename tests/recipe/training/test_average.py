"""The moving average of the weights: its recurrence, its place in checkpoints, and that training does not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention import AttentionConfig, build_attention
from data.batches import Batches, GlobalBatch
from model.gpt import GPT
from model.options import GPTConfig
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.training.checkpoint import load_checkpoint, save_checkpoint
from recipe.training.device import Precision
from recipe.training.optimizer import OptimizerConfig
from recipe.training.options import TrainingConfig
from recipe.training.step import Trainer

T, B, DECAY = 16, 2, 0.3
TRAINING = TrainingConfig(steps=20, batch_size=B, precision=Precision.fp32, ema=DECAY)
TEXT = np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint8)
BATCHES = Batches(TEXT, T, GlobalBatch(B), seed=1)
WINDOWS = [BATCHES.stored(100).widened()]


def build(training: TrainingConfig = TRAINING, optimizer: str = "adamw") -> Trainer:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layers=1, n_heads=2, n_embd=32), 50, T, build_attention(AttentionConfig(dropout=0.1)))
    config = Config(seed=0, optimizer=OptimizerConfig(name=optimizer, lr=1e-2), training=training)
    return build_trainer(config, model, torch.device("cpu"), World())


def train(trainer: Trainer, first: int, last: int) -> list[float]:
    return [float(trainer.update(step, [BATCHES.stored(step).widened()])["train/loss"]) for step in range(first, last)]


def vector(trainer: Trainer) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel().astype(np.float64) for p in trainer.model.parameters()])


def average(trainer: Trainer) -> np.ndarray:
    assert trainer.average is not None
    return np.concatenate([w.numpy().ravel() for w in trainer.average.weights.values()])


def test_it_follows_its_recurrence_and_stays_where_an_update_is_skipped() -> None:
    trainer = build()
    expected = vector(trainer)
    for step in range(5):
        train(trainer, step, step + 1)
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * vector(trainer)
        np.testing.assert_allclose(average(trainer), expected, rtol=1e-5, atol=1e-7)
    before = average(trainer)
    trainer.failure[0] = 4.0  # no later update is taken
    train(trainer, 5, 6)
    np.testing.assert_array_equal(average(trainer), before)


def test_training_and_evaluation_do_not_notice_it() -> None:
    with_average, without = build(), build(replace(TRAINING, ema=0.0))
    assert train(with_average, 0, 3) == train(without, 0, 3)
    measured = with_average.measure(WINDOWS)
    assert without.measure(WINDOWS) == {"val/loss": measured["val/loss"]}
    assert train(with_average, 3, 5) == train(without, 3, 5)
    assert measured["val/loss_ema"] != measured["val/loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_has_the_average_of_an_uninterrupted_one(tmp_path: Path, optimizer: str) -> None:
    whole, first, second = (build(optimizer=optimizer) for _ in range(3))
    expected = train(whole, 0, 6)
    train(first, 0, 3)
    second.load(save_checkpoint(tmp_path, first.state(), 3, keep_last=1, metadata={}))
    assert train(second, 3, 6) == expected[3:]
    np.testing.assert_array_equal(average(second), average(whole))
    assert second.measure(WINDOWS) == whole.measure(WINDOWS)


def test_a_run_may_gain_or_lose_it_when_it_is_resumed(tmp_path: Path) -> None:
    without, with_average = build(replace(TRAINING, ema=0.0)), build()
    train(without, 0, 3)
    train(with_average, 0, 3)
    path = save_checkpoint(tmp_path / "a", without.state(), 3, keep_last=1, metadata={})
    gained = build()
    gained.load(path)
    np.testing.assert_array_equal(average(gained), vector(without))
    path = save_checkpoint(tmp_path / "b", with_average.state(), 3, keep_last=1, metadata={})
    lost = build(replace(TRAINING, ema=0.0))
    lost.load(path)
    assert train(lost, 3, 5) == train(without, 3, 5)
    assert not any(name.startswith("average.") for name in lost.state()["training"])
    assert any(name.startswith("average.") for name in load_checkpoint(path)["training"])
