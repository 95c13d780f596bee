"""The pages that the benchmark times hold the tokens that the contiguous cache has."""

from __future__ import annotations

import pytest
import torch

from attention import Cache
from bench.generate.decode import PAGES, paged


@pytest.mark.parametrize("size", PAGES)
def test_pages_hold_the_same_tokens(size: int) -> None:
    k, v = torch.randn(2, 3, 2, 512, 4, generator=torch.Generator().manual_seed(0))
    cache = Cache(k, v, torch.full((3,), 512, dtype=torch.int32))
    assert all(map(torch.equal, paged(cache, size).read(0, 512), (k, v)))
