"""The time of the attention alone."""

from __future__ import annotations

import time

import pytest
import torch

from attention import AttentionConfig, AttentionShape, Score, build_attention
from attention.interface import Attention
from recipe.profiling.attention_time import attention_ms


def shape(*scores: Score) -> AttentionShape:
    return AttentionShape(
        head_dim=8, n_heads=2, n_kv_heads=2, dtype=torch.float32, device=torch.device("cpu"), scores=scores
    )


@pytest.mark.parametrize("score", [Score(), Score(window=4), Score(alibi=True), Score(sinks=True)])
def test_every_score_can_be_timed(score: Score) -> None:
    assert attention_ms(build_attention(AttentionConfig()), shape(score), 1, 16) > 0


def test_the_layers_add_up_and_the_first_pass_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    attend, calls = build_attention(AttentionConfig()), []
    inner = Attention.__call__

    def slow(self, *arguments, score, **rest):
        calls.append(score)
        time.sleep(0.5 if calls.count(score) == 1 else 0.15 if score.window else 0.1)
        return inner(self, *arguments, score=score, **rest)

    monkeypatch.setattr(type(attend), "__call__", slow)
    near, far = Score(window=4), Score()
    assert attention_ms(attend, shape(far, near, far), 1, 16) == pytest.approx(2 * 100 + 150, rel=0.15)
