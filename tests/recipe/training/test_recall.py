"""Probes against models whose answers and losses are known."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tasks import TASKS, VALIDATION, VALIDATION_SEED, Needle, drawn
from model.gpt import GPT
from model.options import GPTConfig, Positions
from model.positions import PositionTables
from recipe.training.recall import PositionLoss, TaskRecall, lengths_for, stretched
from tests.parts import built

T = 32
SMALL = GPTConfig(n_layers=2, n_heads=2, n_embd=16)


class ShortSighted:
    """Knows every needle that is at most `reach` tokens back, and else answers another one."""

    def __init__(self, reach: int, positions: Positions) -> None:
        self.reach, self.seq_len = reach, T
        self.config = GPTConfig(positions=positions, n_embd=Needle.vocab_size, n_heads=1)
        self.wte = SimpleNamespace(weight=torch.eye(Needle.vocab_size))
        self.tables = PositionTables()

    def hidden(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= self.seq_len
        answers = torch.full_like(tokens, 1)
        for row, line in enumerate(tokens.tolist()):
            (place,) = [i for i, token in enumerate(line) if 0 < token <= Needle.NEEDLES]
            for i in range(place, len(line)):
                right = line[place]
                answers[row, i] = right if i - place <= self.reach else right % Needle.NEEDLES + 1
        return F.one_hot(answers, Needle.vocab_size).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_accuracy_by_length_and_distance_shows_how_far_a_model_sees():
    model, probe = ShortSighted(16, Positions.none), TaskRecall(TASKS["needle"], T)
    metrics, details = probe.details(model)  # type: ignore[arg-type]
    assert details["lengths"] == [32, 64, 128, 256]
    assert details["distances"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert details["chance"] == 1 / 64
    for row in details["accuracy"]:
        assert all(cell in (1.0, None) for cell in row[:4])
        assert 0 < row[4] < 1  # from 16 to 31: the first of them alone is seen
        assert all(cell in (0.0, None) for cell in row[5:])
    within = [s.distance[s.targets > 0] <= 16 for s in drawn(Needle(), 128, VALIDATION_SEED, VALIDATION, range(128))]
    assert metrics["probe/needle_x4"] == pytest.approx(np.concatenate(within).mean())


def test_at_the_trained_length_the_accuracy_is_that_of_every_evaluation():
    probe = TaskRecall(TASKS["needle"], T)
    assert probe.measure(ShortSighted(T, Positions.none)) == {"probe/needle": 1.0}  # type: ignore[arg-type]
    assert probe.measure(ShortSighted(0, Positions.none)) == {"probe/needle": 0.0}  # type: ignore[arg-type]


def test_learned_positions_are_not_measured_beyond_their_length():
    metrics, details = TaskRecall(TASKS["needle"], T).details(ShortSighted(T, Positions.learned))  # type: ignore[arg-type]
    assert (metrics, details["lengths"]) == ({}, [T])


@pytest.mark.parametrize("name", [name for name in TASKS if name != "needle"])
def test_every_task_is_measured_at_every_distance_that_it_asks(name):
    task = TASKS[name]
    _, details = TaskRecall(task, T).details(build(SMALL))
    asked = {
        int(d) for s in drawn(task, T, VALIDATION_SEED, VALIDATION, range(512)) for d in s.distance[s.targets >= 0]
    }
    edges = [*details["distances"], math.inf]
    for (low, high), accuracy in zip(pairwise(edges), details["accuracy"][0], strict=True):
        assert (accuracy is not None) == any(low <= distance < high for distance in asked)


def build(config: GPTConfig, seq_len: int = T) -> GPT:
    return built(config, seq_len, 256).eval()


@pytest.mark.parametrize("positions", [Positions.rotary, Positions.none])
def test_a_stretched_model_is_the_model_of_that_length_and_then_itself_again(positions):
    config = replace(SMALL, positions=positions)
    short, long = build(config), build(config, 4 * T)
    tokens = torch.randint(256, (2, 4 * T), generator=torch.Generator().manual_seed(0))
    before = short(tokens[:, :T])
    with stretched(short, 4 * T):
        assert torch.equal(short(tokens), long(tokens))
    assert short.seq_len == T
    assert torch.equal(short(tokens[:, :T]), before)
    assert lengths_for(short, T) == [T, 2 * T, 4 * T, 8 * T]


class LossByPosition:
    """Gives the right token a logit that makes its loss log(256) at position 0, and 1 / (1 + i / 40) of that at i."""

    config = GPTConfig(positions=Positions.none, n_embd=1, n_heads=1)
    tables = PositionTables()
    wte = SimpleNamespace(weight=torch.zeros(1))
    seq_len = T

    def __call__(self, tokens: Tensor) -> Tensor:
        wanted = math.log(256) / (1 + torch.arange(tokens.shape[1], dtype=torch.float64) / 40)
        right = torch.log(255 / torch.expm1(wanted))  # loss = log(1 + 255 exp(-logit))
        return F.one_hot((tokens + 1) % 256, 256) * right[None, :, None]


def test_the_loss_by_position_is_that_of_each_place_in_the_window():
    model, probe = LossByPosition(), PositionLoss(np.arange(5000, dtype=np.uint16) % 256, 40)
    expected = math.log(256) / (1 + np.arange(320) / 40)
    metrics = probe.measure(model)  # type: ignore[arg-type]
    assert metrics["probe/in_context_score"] == pytest.approx(expected[38:40].mean() - expected[4:6].mean(), rel=1e-5)
    beyond, details = probe.details(model)  # type: ignore[arg-type]
    assert beyond["probe/loss_beyond_x2"] == pytest.approx(expected[40:80].mean(), rel=1e-5)
    assert beyond["probe/loss_beyond_x8"] == pytest.approx(expected[160:320].mean(), rel=1e-5)
    edges = [*details["positions"], 320]
    means = [expected[low:high].mean() for low, high in pairwise(edges)]
    assert details["loss"] == pytest.approx(means, rel=1e-5)
