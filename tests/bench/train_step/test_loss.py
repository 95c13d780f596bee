"""The benchmark of losses, without a GPU."""

from __future__ import annotations

import pytest
import torch

import model.loss
from bench.train_step.loss import PADDED, VOCAB, candidates


def test_chunks_have_the_rows_that_were_asked_for(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    softmax_gradient_ = model.loss.softmax_gradient_

    def record(x: torch.Tensor, *rest) -> torch.Tensor:
        seen.append(len(x))
        return softmax_gradient_(x, *rest)

    monkeypatch.setattr(model.loss, "softmax_gradient_", record)
    hidden, weight = torch.randn(7, 2), torch.randn(PADDED, 2)
    candidates([3])["chunked, 3 rows"](hidden, weight, torch.randint(VOCAB, (7,)))
    assert seen == [3, 3, 1]
