"""Hardware that this machine need not have."""

from __future__ import annotations

import pytest


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a Hopper GPU were at hand."""
    triton = pytest.importorskip("triton")
    from attention import gpu
    from attention.flash import paths

    monkeypatch.setattr(paths, "INTERPRET", triton.language.constexpr(False))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
