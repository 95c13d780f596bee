"""The plain Triton kernels without a GPU: what the interpreter cannot run is compiled for one, and does not grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attention.compiler import SHARED, compiled

# Of each kernel the registers of a thread and the bytes that it spills, with Triton 3.6 or 3.7, whichever is more.
MOST = {
    f"{problem}-{kernel}": most
    for problem, kernels in json.loads(Path(__file__).with_name("compiled_plain.json").read_text()).items()
    for kernel, most in kernels.items()
}
# Limited to 96 registers, their products wait for each other, and five programs on a multiprocessor make up for it.
SERIALISED = {
    "hopper-causal-64-exact-2048-forward",
    "hopper-window-64-exact-inf-forward",
    "hopper-documents-64-exact-inf-forward",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_take_no_more_registers_than_today_nor_outgrow_the_chip():
    kernels = {found.pop("name"): found for found in compiled("compiled_plain", "resources", *SHARED)}
    assert kernels.keys() == MOST.keys()
    too_much = {
        name: found
        for name, found in kernels.items()
        if any(now > most for now, most in zip((found["registers"], found["spilled"]), MOST[name], strict=True))
        or found["shared"] > SHARED[name.split("-")[0]]
        or (found["serialised"] and name not in SERIALISED)
        or not found["fused"]
    }
    assert not too_much


@pytest.mark.slow
def test_no_length_and_no_position_recompiles_a_kernel():
    assert compiled("compiled_plain", "lengths", "hopper") == [{"forward": 1, "dq": 1, "dkdv": 1}]
