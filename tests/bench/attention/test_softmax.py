"""The three softmax kernels of the benchmark compute softmax."""

from __future__ import annotations

import pytest
import torch

from bench.attention.softmax import KERNELS, softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("length", [1, 1000, 1024, 2500])
def test_each_kernel_is_softmax(kind: str, length: int) -> None:
    x = 3 * torch.randn(3, length, generator=torch.Generator().manual_seed(length)).to(DEVICE)
    expected = torch.softmax(x.double(), -1)
    torch.testing.assert_close(softmax(x, kind).double(), expected, rtol=1e-5, atol=0)


def test_only_the_native_one_overflows() -> None:
    x = torch.tensor([[100.0, 0.0, 99.0]], device=DEVICE)
    assert softmax(x, "native").isnan().any()
    for kind in ("safe", "online"):
        torch.testing.assert_close(softmax(x, kind).double(), torch.softmax(x.double(), -1))
