"""Settings of all tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Gives freed memory back after each test: the processes that run tests share the GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
