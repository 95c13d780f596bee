"""The time of the attention alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, AttentionOutput, AttentionShape, Score, build_attention
from attention.interface import Call
from attention.naive import NaiveAttention
from recipe.run.attention_time import attention_ms


def shape(*scores: Score) -> AttentionShape:
    return AttentionShape(
        head_dim=8, n_heads=2, n_kv_heads=2, dtype=torch.float32, device=torch.device("cpu"), scores=scores
    )


@pytest.mark.parametrize("score", [Score(), Score(window=4), Score(alibi=True), Score(sinks=True)])
def test_every_score_can_be_timed(score: Score) -> None:
    assert attention_ms(build_attention(AttentionConfig()), shape(score), 1, 16) > 0


def test_the_layers_add_up_and_the_first_pass_does_not_count() -> None:
    now, calls = 0.0, []

    class Slow(NaiveAttention):
        """Takes half a second for the first pass of a score, then 0.15 s with a window and 0.1 s without."""

        def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> AttentionOutput:
            nonlocal now
            calls.append(call.spec.score)
            now += 0.5 if calls.count(call.spec.score) == 1 else 0.15 if call.spec.score.window else 0.1
            return super().attend(q, k, v, call)

    near, far = Score(window=4), Score()
    measured = attention_ms(Slow(AttentionConfig()), shape(far, near, far), 1, 16, clock=lambda: now)
    assert measured == pytest.approx(2 * 100 + 150)
