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
    "hopper-full-64-dropout-inf-dq": 64,
    "hopper-full-64-dropout-inf-dkdv": 96,
    "hopper-alibi-64-exact-inf-forward": 24,
    "hopper-alibi-64-exact-inf-dkdv": 96,
    "hopper-alibi-64-dropout-inf-dkdv": 128,
    "hopper-soft_cap-128-exact-inf-dkdv": 64,
    "older-causal-64-exact-inf-dkdv": 56,
    "older-causal-64-dropout-inf-dkdv": 88,
    "older-causal-128-exact-inf-dkdv": 24,
    "older-full-64-exact-inf-dkdv": 8,
    "older-everything-64-exact-inf-dkdv": 144,
    "older-everything-64-dropout-inf-dq": 32,
    "older-everything-64-dropout-inf-dkdv": 288,
    "hopper-causal-256-exact-inf-dq": 320,
    "hopper-causal-256-dropout-inf-dq": 432,
    "older-causal-256-exact-inf-dkdv": 48,
    "older-causal-256-dropout-inf-dkdv": 80,
    "older-window-64-exact-inf-dkdv": 88,
    "older-documents-64-exact-inf-dkdv": 88,
    "older-alibi-64-exact-inf-dkdv": 72,
    "older-soft_cap-64-exact-inf-dkdv": 88,
}
# The most registers of a thread with which 5, 4 or 3 programs of four warps fit on a multiprocessor, or half as many of
# eight, and the kernels that stay below. All others may have 255.
REGISTERS = {
    96: {
        "hopper-causal-64-exact-2048-forward",
        "hopper-window-64-exact-inf-forward",
        "hopper-documents-64-exact-inf-forward",
        "hopper-window-64-exact-inf-dq",
        "hopper-documents-64-exact-inf-dq",
    },
    128: {
        "hopper-causal-64-exact-2048-dq",
        "hopper-causal-64-exact-8192-dq",
        "hopper-causal-64-dropout-2048-forward",
        "hopper-window-128-exact-inf-dq",
        "hopper-documents-128-exact-inf-dq",
        "hopper-soft_cap-64-exact-inf-dq",
        "hopper-soft_cap-64-dropout-inf-forward",
    },
    168: {
        "hopper-causal-64-exact-2048-dkdv",
        "hopper-causal-64-exact-8192-forward",
        "hopper-causal-64-exact-8192-dkdv",
        "hopper-causal-64-exact-inf-forward",
        "hopper-causal-64-exact-inf-dkdv",
        "hopper-causal-64-dropout-2048-dq",
        "hopper-causal-64-dropout-2048-dkdv",
        "hopper-causal-64-dropout-8192-dq",
        "hopper-causal-128-exact-2048-forward",
        "hopper-causal-128-dropout-2048-forward",
        "hopper-full-64-exact-inf-forward",
        "hopper-full-64-exact-inf-dkdv",
        "hopper-everything-64-dropout-inf-forward",
        "hopper-window-64-exact-inf-dkdv",
        "hopper-window-128-exact-inf-forward",
        "hopper-documents-64-exact-inf-dkdv",
        "hopper-documents-128-exact-inf-forward",
        "hopper-alibi-64-exact-inf-forward",
        "hopper-alibi-64-exact-inf-dq",
        "hopper-alibi-64-exact-inf-dkdv",
        "hopper-alibi-64-dropout-inf-dq",
        "hopper-soft_cap-64-exact-inf-forward",
        "hopper-soft_cap-64-dropout-inf-dq",
        "hopper-soft_cap-128-exact-inf-forward",
        "older-causal-64-exact-inf-forward",
        "older-causal-128-exact-inf-forward",
        "older-causal-128-exact-inf-dq",
        "older-full-64-exact-inf-forward",
        "older-window-64-exact-inf-forward",
        "older-documents-64-exact-inf-forward",
        "older-soft_cap-64-exact-inf-forward",
    },
}
# Limited to 96 registers, their products wait for each other, and five programs on a multiprocessor make up for it.
SERIALISED = {name for name in REGISTERS[96] if name.endswith("forward")}
MOST_REGISTERS = {name: registers for registers, names in REGISTERS.items() for name in names}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_take_no_more_registers_than_today_nor_outgrow_the_chip():
    kernels = {found.pop("name"): found for found in compiled("compiled_plain", "resources", *SHARED)}
    assert {*SPILLED, *MOST_REGISTERS} <= set(kernels)
    assert {name.split("-")[0] for name in kernels} == set(SHARED)
    too_much = {
        name: found
        for name, found in kernels.items()
        if found["spilled"] > SPILLED.get(name, 0)
        or found["registers"] > MOST_REGISTERS.get(name, 255)
        or found["shared"] > SHARED[name.split("-")[0]]
        or (found["serialised"] and name not in SERIALISED)
    }
    assert not too_much


@pytest.mark.slow
def test_no_length_and_no_position_recompiles_a_kernel():
    assert compiled("compiled_plain", "lengths", "hopper") == [{"forward": 1, "dq": 1, "dkdv": 1}]
