"""The prefetcher's stream on a GPU: every batch arrives complete and lives until it has been read."""

import numpy as np
import pytest
import torch

from data.batches import Batches, GlobalBatch
from data.prefetcher import Prefetcher


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_batches_reach_a_busy_gpu_unharmed(dtype):
    tokens = (np.arange(1 << 20) * 2654435761 >> 7).astype(dtype)
    batches = Batches(tokens, 1024, GlobalBatch(16, micro_steps=2), seed=1)
    expected, seen = [], []
    with Prefetcher(batches, "cuda", start_step=3) as prefetcher:
        for i in range(200):
            inputs, targets, *_ = next(prefetcher)
            assert inputs.is_contiguous()
            assert targets.is_contiguous()
            torch.cuda._sleep(2_000_000)  # delays the copy below, while the thread reuses freed batches
            seen.append(torch.stack([inputs, targets]))
            del inputs, targets
            expected.append(torch.stack(batches.stored(3 + i // 2, i % 2).widened().tensors()))
    for arrived, sent in zip(seen, expected, strict=True):
        assert torch.equal(arrived.cpu(), sent)
