"""The calls around a CUDA graph, with stand-ins for what needs a GPU. tests/gpu/test_training_step.py replays."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from recipe.training.step import WARMUP_CALLS, GraphedStep


def test_recording_compiles_nothing_where_batches_are_views_and_other_shapes_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their sizes and offsets have then become symbols of the compiler, and 0 is no offset like others."""
    for name in ("Stream", "CUDAGraph", "current_stream", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr("recipe.training.step.capturing", lambda graph, stream: nullcontext())
    compiled = CompileCounter()

    @torch.compile(backend=compiled)
    def total(inputs: Tensor, targets: Tensor) -> Tensor:
        return (2 * inputs + targets).sum()

    def batch(rows: int, seed: int) -> Tensor:
        return torch.randint(99, (2, rows, 16), generator=torch.Generator().manual_seed(seed))

    total(*batch(3, 0))
    step = GraphedStep(lambda *tensors: {"total": total(*tensors)}, torch.device("cpu"))
    for call in range(WARMUP_CALLS + 1):
        counts = compiled.frame_count
        outputs = step(*batch(4, call))
        assert outputs["total"] == (batch(4, call).sum(dim=(1, 2)) * torch.tensor([2, 1])).sum()
    assert step.graph is not None
    assert compiled.frame_count == counts
