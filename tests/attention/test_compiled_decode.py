"""The kernels of attend.decode and cache.write without a GPU: what the interpreter cannot run is compiled for one."""

from __future__ import annotations

import pytest

from tests.attention.compiler import SHARED, compiled


@pytest.mark.slow
def test_kernels_compile_and_neither_spill_nor_outgrow_the_chip():
    kernels = {found.pop("name"): found for found in compiled("compiled_decode", *SHARED)}
    assert len(kernels) == 12
    for name, found in kernels.items():
        assert found["spilled"] == 0, name
        assert found["shared"] <= SHARED[name.split("-")[0]], name
        assert found["fused"], name
