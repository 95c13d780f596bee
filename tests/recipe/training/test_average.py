"""The moving average of the weights: its recurrence, its place in checkpoints, and that training does not change."""

import torch
from torch import Tensor

from recipe.training.checkpoint import load_checkpoint, save_checkpoint
from recipe.training.step import Trainer
from tests.recipe.training.test_loop import batches, build, equal, losses, weights

DECAY = 0.3


def average(trainer: Trainer) -> list[Tensor]:
    assert trainer.average is not None
    return [tensor.clone() for tensor in trainer.average.weights.values()]


def test_it_follows_its_recurrence_and_stays_where_an_update_is_skipped():
    trainer = build(ema=DECAY)
    expected = weights(trainer)
    for step in range(5):
        losses(trainer, range(step, step + 1))
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = [decay * x + (1 - decay) * now for x, now in zip(expected, weights(trainer), strict=True)]
        torch.testing.assert_close(average(trainer), expected, rtol=1e-5, atol=1e-7)
    trainer.failure[0] = 4.0  # no later update is taken
    before = average(trainer)
    losses(trainer, range(5, 6))
    assert equal(average(trainer), before)


def test_training_and_evaluation_do_not_notice_it():
    with_average, without = build(ema=DECAY), build()
    windows = [batches(without).stored(100).widened()]
    assert losses(with_average, range(3)) == losses(without, range(3))
    measured = with_average.measure(windows)
    assert without.measure(windows) == {"val/loss": measured["val/loss"]}
    assert losses(with_average, range(3, 5)) == losses(without, range(3, 5))
    assert measured["val/loss_ema"] != measured["val/loss"]


def test_a_resumed_run_keeps_gains_or_loses_it(tmp_path):
    without, lost = build(), build()
    with_average, kept, gained = (build(ema=DECAY) for _ in range(3))
    losses(without, range(3))
    losses(with_average, range(3))
    gained.load(save_checkpoint(tmp_path / "a", without.state(), 3, keep_last=1, metadata={}))
    assert equal(average(gained), weights(without))
    path = save_checkpoint(tmp_path / "b", with_average.state(), 3, keep_last=1, metadata={})
    kept.load(path)
    assert equal(average(kept), average(with_average))
    lost.load(path)
    assert losses(lost, range(3, 5)) == losses(without, range(3, 5))
    assert not any(name.startswith("average.") for name in lost.state()["training"])
    assert any(name.startswith("average.") for name in load_checkpoint(path)["training"])
