"""Fixtures: a Hopper GPU that this machine need not have, and attention that is right or wrong on purpose."""

import pytest

from tests.attention import subjects


@pytest.fixture
def hopper_gpu(monkeypatch):
    """As if a Hopper GPU were at hand."""
    triton = pytest.importorskip("triton")
    from attention import gpu
    from attention.flash import paths

    monkeypatch.setattr(paths, "INTERPRET", triton.language.constexpr(False))
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(gpu, "capability", lambda device: (9, 0))
    paths.choose_path.cache_clear()
    yield
    paths.choose_path.cache_clear()


@pytest.fixture
def registered():
    """The registry also has the implementations of tests/wrong_attention and tests/right_attention.py."""
    with subjects.registered():
        yield
