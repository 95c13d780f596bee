"""The plain Triton kernels without a GPU: what the interpreter cannot run is compiled for one, and does not grow."""

from __future__ import annotations

import pytest

from tests.attention.compiler import SHARED, compiled

# Bytes of registers that a thread spills, with Triton 3.6 and 3.7, whichever is more. All other kernels spill none.
SPILLED = {
    "hopper-causal-64-dropout-2048-dkdv": 88,
    "hopper-causal-64-dropout-8192-dkdv": 104,
    "hopper-causal-64-dropout-inf-dq": 80,
    "hopper-causal-64-dropout-inf-dkdv": 104,
    "hopper-causal-128-exact-512-dq": 96,
    "hopper-causal-128-exact-2048-dq": 96,
    "hopper-causal-128-dropout-2048-dkdv": 8,
    "hopper-causal-128-dropout-inf-dkdv": 8,
    "hopper-full-64-dropout-inf-dq": 56,
    "hopper-full-64-dropout-inf-dkdv": 96,
    "hopper-alibi-64-exact-inf-forward": 24,
    "hopper-alibi-64-exact-inf-dkdv": 88,
    "hopper-alibi-64-dropout-inf-dkdv": 128,
    "hopper-soft_cap-128-exact-inf-dkdv": 64,
    "older-causal-64-exact-inf-dkdv": 32,
    "older-causal-64-dropout-inf-dkdv": 88,
    "older-causal-128-exact-inf-dkdv": 24,
    "older-full-64-exact-inf-dkdv": 8,
    "older-everything-64-exact-inf-dkdv": 144,
    "older-everything-64-dropout-inf-dq": 32,
    "older-everything-64-dropout-inf-dkdv": 288,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ["hopper", "older"])
def test_kernels_compile_and_neither_spill_more_nor_outgrow_the_chip(architecture):
    kernels = {found.pop("name"): found for found in compiled("compiled_plain", "resources", architecture)}
    assert {name for name in SPILLED if name.startswith(architecture)} <= set(kernels)
    too_much = {
        name: found
        for name, found in kernels.items()
        if found["spilled"] > SPILLED.get(name, 0) or found["shared"] > SHARED[architecture]
    }
    assert not too_much


@pytest.mark.slow
def test_no_length_and_no_position_compiles_a_kernel_anew():
    assert compiled("compiled_plain", "lengths", "hopper") == [{"forward": 1, "dq": 1, "dkdv": 1}]
