"""The record of compiled kernels: what CI compiles again, and what it refuses."""

import json
import os
import re
import runpy
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.kernels.__main__ import NEW, bound, faults, growth, other_code, renewed
from bench.kernels.compiler import Kernel, Report, canonical, code_of, overlapping_barriers
from bench.kernels.record import Entry, Figures, Record
from bench.machine import ROOT

FIGURES = Figures("ptx", registers=100, spilled=8, shared=4096, serialised=0)
GROWN, CHANGED = "exchange/sm80/sum-float32/add_pairwise", "exchange/sm80/sum-bfloat16/add_pairwise"
# Triton chooses between compiler and interpreter when it is imported, so kernels are compiled in a process without it.
SCRIPT = """
import itertools, json, sys
from functools import partial
from pathlib import Path
import torch
from attention.flash.call import ConfigKey, KernelCall
from attention.spec import Inputs
from bench.kernels.__main__ import main
from bench.kernels.compiler import Launch, collect
from bench.kernels.plain import CAUSAL, launch

def lengths():
    # Lengths, positions and, with the lengths, the number of heads that run at a time. Triton by default specialises
    # kernels for three kinds of length: 1, multiples of 16 and others.
    for n, (queries, keys) in enumerate(itertools.product((1, 16, 17, 48, 100), repeat=2)):
        call = KernelCall(CAUSAL._replace(offsets=True), Inputs(), q_start=n - 1, k_start=16 * (n % 2))
        sizes = 90, ConfigKey(64, False, 128), call, torch.bfloat16, queries, keys
        yield Launch(f"{queries}-{keys}", partial(launch, *sizes))

kernels = {}
for kernel in collect(90, lengths()):
    kernels.setdefault(kernel.name.split("/")[-1], set()).add(kernel.sources)
print(json.dumps({name: len(sources) for name, sources in kernels.items()}), flush=True)
sys.exit(main(["--changed", "--check"], Path(sys.argv[1])))
"""


class Check(NamedTuple):
    """What the process above printed and returned."""

    lengths: dict[str, int]
    lines: list[str]
    status: int


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """The check of CI, with a record in which two kernels have other sources, and one of them too few registers."""
    record = Record.read()
    for name, most in ((GROWN, 1), (CHANGED, 255)):
        figures = Figures("", registers=most, spilled=0, shared=0, serialised=0)
        record.kernels[name] = Entry("of another kernel", {triton.__version__: figures})
    path = tmp_path_factory.mktemp("record") / "record.json"
    record.write(path)
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-c", SCRIPT, str(path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    lengths, *lines = run.stdout.splitlines()
    return Check(json.loads(lengths), lines, run.returncode)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_changed_kernels_and_one_of_each_kind_compile_and_only_one_that_grew_is_refused(check):
    _, *wrong = check.lines
    (line,) = wrong
    assert re.fullmatch(rf"{GROWN} has \d+ registers a thread; at most 1 are recorded", line)
    assert check.status == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_length_and_no_position_recompiles_a_kernel(check):
    assert check.lengths == {"forward": 1, "dq": 1, "dkdv": 1}


def kernel(name="group/sm90/case/forward", sources="a"):
    """A kernel that is not compiled."""
    source: Any = None
    return Kernel(name, sources, source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": True})


def report(**changed):
    """Of a kernel of 128 threads with FIGURES but for these."""
    return Report(FIGURES._replace(**changed), 128, ())


def test_a_kernel_may_not_take_more_than_its_bound():
    assert not list(growth(kernel(), report(), FIGURES))
    assert not list(growth(kernel(), report(registers=90, spilled=0, shared=8192), FIGURES))
    grown = (report(registers=101), report(spilled=12), report(serialised=1))
    for more, text in zip(grown, ("101 registers", "12 spilled bytes", "1 serialised products"), strict=True):
        (line,) = growth(kernel(), more, FIGURES)
        assert line.startswith(f"{kernel().name} has {text}")
    assert list(growth(kernel(), report(), NEW)), "a new kernel must not spill"


def test_a_kernel_must_fit_its_gpu():
    assert not list(faults(kernel(), report()))
    assert "shared memory" in next(faults(kernel(), report(shared=240_000)))
    assert "registers a thread" in next(faults(kernel(), Report(FIGURES._replace(registers=176), 384, ())))
    unfused = kernel()._replace(options={"enable_fp_fusion": False})
    assert "enable_fp_fusion" in next(faults(unfused, report()))
    assert "overlap" in next(faults(kernel(), Report(FIGURES, 128, (16,))))


def test_a_renewed_record_has_new_figures_and_the_others_become_bounds():
    new = report(ptx="new", registers=80)
    record = Record(
        {"same": Entry("a", {"3.6": FIGURES}), "other": Entry("b", {"3.6": FIGURES}), "gone": Entry("c", {})}
    )
    today = {"same": kernel("same"), "other": kernel("other", "changed"), "added": kernel("added", "d")}
    result = renewed(record, today, {"other": new, "added": new}, "3.7").kernels
    assert result == {
        "same": Entry("a", {"3.6": FIGURES}),
        "other": Entry("changed", {"3.6": FIGURES._replace(ptx=""), "3.7": new.figures}),
        "added": Entry("d", {"3.7": new.figures}),
    }


def test_a_bound_is_that_of_the_same_triton_or_the_most_of_others():
    fewer = FIGURES._replace(registers=90, spilled=20)
    record = Record({"k": Entry("a", {"3.6": FIGURES, "3.7": fewer})})
    assert bound(record, kernel("k", "a"), "3.7") == bound(record, kernel("k", "b"), "3.7") == fewer
    assert bound(record, kernel("k", "a"), "3.9") is None  # an unchanged kernel that this Triton has not compiled
    assert bound(record, kernel("k", "b"), "3.9") == Figures("", 100, 20, 4096, 0)
    assert bound(record, kernel("added", "a"), "3.7") == NEW


def test_other_code_from_the_same_sources_is_reported():
    record = Record({"k": Entry("a", {"3.7": FIGURES})})
    assert not list(other_code(record, {"k": report()}, "3.7"))
    (line,) = other_code(record, {"k": report(ptx="other")}, "3.7")
    assert "make kernels" in line


SOURCES = '''
STEP = {step}
def inner(x):
    """{docstring}"""
    return x + {added}
inner = JITFunction(inner)
def outer(x):
    return inner(x) + STEP  # {comment}
outer = JITFunction(outer)
'''


def test_a_kernels_digest_follows_its_code_and_all_that_it_calls_and_names(tmp_path):
    plain = {"step": 1, "docstring": "", "added": 1, "comment": ""}
    same = [plain, plain | {"docstring": "Adds one."}, plain | {"comment": "why"}]
    other = [plain | {"step": 2}, plain | {"added": 2}]
    digests = []
    for n, values in enumerate(same + other):
        path = tmp_path / f"kernels_{n}.py"
        path.write_text(SOURCES.format(**values))
        digests.append(code_of(runpy.run_path(str(path), {"JITFunction": JITFunction})["outer"]))
    assert len(set(digests[: len(same)])) == 1
    assert len(set(digests)) == 1 + len(other)


def test_canonical_ptx_is_the_same_for_other_register_numbers_and_comments():
    first = "ld %r7, [%rd3]; // from a.py:10\nadd.s32 %r8, %r7, 1;\n.reg .b32 %r<9>;"
    second = "ld %r1, [%rd1];\nadd.s32 %r2, %r1, 1; // moved\n.reg .b32 %r<3>;"
    assert canonical(first) == canonical(second)
    assert canonical(first) != canonical(second.replace("%r1, 1", "%r2, 1"))


def test_a_barrier_that_overlaps_other_shared_memory_is_noticed():
    ptx = "add.s32 %r1, %r0, 64;\nmbarrier.init.shared::cta.b64 [%r1], 1;\n"
    assert overlapping_barriers(f"{ptx}st.shared.b32 [global_smem + 64], %r9;") == (64,)
    assert overlapping_barriers(f"{ptx}st.shared.b32 [global_smem + 72], %r9;") == ()
