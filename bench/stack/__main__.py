"""Check this checkout with the torch, Triton and Python of this environment, and record the result.

    python -m bench.stack
    python -m bench.stack --smoke     a few of the tests, in a quarter of a minute

Runs a selection of the tests, in Triton's interpreter. Compiles attention's kernels for several GPUs, once for each
Triton version at a commit; this machine needs none of these GPUs. Adds rows to bench/results/stack-tests-<CPU>.json
and stack-kernels-<CPU>.json, and prints their tables. Fails if a test fails, or if a kernel does not compile for one
of NVIDIA's GPUs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from bench.machine import ROOT, device_name, version
from bench.record import Recorder, command_line, command_of, measurement, result_file
from bench.stack import NVIDIA, OTHERS
from bench.tables.stack import kernels_of_each, pairs

# Tests of the parts that depend on the releases: kernels and their operators, torch's compiler, its attention and
# optimizers, transformers, Hydra, checkpoints.
TESTS = (
    "tests/attention/test_flash.py",
    "tests/attention/test_interface.py",
    "tests/attention/test_formula.py",
    "tests/attention/test_tiled.py",
    "tests/attention/test_decode.py",
    "tests/attention/test_peers.py",
    "tests/attention/test_torch_sdpa.py",
    "tests/attention/test_transformers.py",
    "tests/model/test_gpt.py::test_compiles_into_one_graph_for_every_step",
    "tests/recipe/training/test_optimizer.py",
    "tests/recipe/training/test_checkpoint.py",
    "tests/recipe/test_config.py::test_help_names_groups_choices_and_overrides",
    "tests/test_train.py::test_the_summary_describes_the_run",
)
# Of each of these a test or two: kernels and their gradients, opcheck, decoding, one graph, torch's switch and so on.
SMOKE = (
    "tests/attention/test_flash.py::test_views_of_one_projection_get_the_gradient_of_the_formula",
    "tests/attention/test_flash.py::test_the_operator_keeps_torchs_rules",
    "tests/attention/test_formula.py::test_the_kernels_give_what_python_gives_of_a_formulas_text_with_all_gradients",
    "tests/attention/test_formula.py::test_a_compiled_call_has_no_break_and_gives_the_same_by_operators_that_keep_torchs_rules",
    "tests/attention/test_decode.py::test_new_tokens_follow_those_of_their_sequence",
    "tests/attention/test_torch_sdpa.py",
    "tests/attention/test_transformers.py::test_logits_and_gradients_are_those_of_eager_attention",
    "tests/model/test_gpt.py::test_compiles_into_one_graph_for_every_step",
    "tests/recipe/training/test_optimizer.py::test_muon_is_torchs_for_each_hidden_matrix_and_adamw_for_the_rest",
    "tests/recipe/training/test_checkpoint.py::test_the_loaded_state_is_the_saved_one",
    "tests/recipe/test_config.py::test_help_names_groups_choices_and_overrides",
    "tests/test_train.py::test_the_summary_describes_the_run",
)


def run_tests(tests: Sequence[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped, with their progress on the terminal."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    process.wait()
    counts = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", lines[-1] if lines else "")
    }
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    return {
        "passed": counts.get("passed", 0),
        "failed": failed or int(process.returncode != 0),
        "skipped": counts.get("skipped", 0),
    }


def compile_kernels() -> dict[str, str]:
    """GPU -> the number of kernels that compiled for it, or the reason why one did not."""
    outcomes = {}
    for names in (NVIDIA, OTHERS):
        run = subprocess.run(
            [sys.executable, "-m", "bench.stack.kernels", *names],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"},
            capture_output=True,
            text=True,
        )
        reports = {report["gpu"]: report for report in map(json.loads, run.stdout.splitlines())}
        ended = run.stderr.strip().splitlines()[-1:]  # LLVM may end the process
        for name in names:
            report = reports.get(name, {"refusal": " ".join(ended)})
            outcomes[name] = report["refusal"] or f"{report['kernels']} kernels"
            print(f"{name}: {outcomes[name]}", flush=True)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a test failed or a kernel did not compile."""
    parser = command_line("bench.stack", __doc__, "stack-tests")
    parser.add_argument("--smoke", action="store_true", help="a few of the tests")
    args = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    head = measurement(command_of(parser, arguments), cpu)
    versions = {"python": platform.python_version(), "torch": version("torch"), "triton": version("triton")}
    print(f"Python {versions['python']}, torch {versions['torch']}, Triton {versions['triton']}", flush=True)

    def recorder(name: str, identity: Sequence[str]) -> Recorder:
        return Recorder(result_file(name, device_name(cpu), args.results), identity, head, software=())

    with recorder("stack-kernels", ["triton"]) as kernels:
        row = kernels.earlier(versions)
        if row is None or row["measurement"]["commit"] != head["commit"] or head["dirty"]:
            kernels.add(row := versions | {"kernels": compile_kernels()})
    with recorder(args.name, ["python", "torch"]) as tests:
        start = time.monotonic()
        counts = run_tests(SMOKE if args.smoke else TESTS)
        tests.add({**versions, "smoke": args.smoke, **counts, "seconds": round(time.monotonic() - start)})
    print(pairs(list(tests.rows.values())), kernels_of_each(list(kernels.rows.values())), sep="\n\n", flush=True)
    return int(counts["failed"] > 0 or not all(row["kernels"][name].endswith(" kernels") for name in NVIDIA))


if __name__ == "__main__":
    sys.exit(main())
