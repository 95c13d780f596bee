"""Check this checkout with the torch, Triton and Python of this environment, and record the result.

    python -m bench.stack

Runs a selection of the tests, in Triton's interpreter, then compiles attention's kernels for several GPUs, none of
which this machine needs to have. Adds a row to .cache/stack/stack-<CPU>.json, and prints the table of its rows. Fails
if a test does, or if a kernel does not compile for one of NVIDIA's GPUs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

import torch

from bench.machine import ROOT, device_name, version
from bench.markdown import table
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from bench.stack import NVIDIA, OTHERS

# Each part once: the kernels and their operator, the interface, compiled models, the program and Hydra.
TESTS = (
    "tests/attention/test_flash.py",
    "tests/attention/test_interface.py",
    "tests/model/test_gpt.py::test_compiles_into_one_graph_for_every_step",
    "tests/recipe/test_config.py::test_help_names_groups_choices_and_overrides",
    "tests/test_train.py::test_the_summary_tells_how_the_run_went",
)


def run_tests() -> dict[str, int]:
    """How many of TESTS passed, failed and were skipped, with their progress on the terminal."""
    command = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
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
    """GPU -> how many kernels compiled for it, or why one did not."""
    found = {}
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
            found[name] = report["refusal"] or f"{report['kernels']} kernels"
            print(f"{name}: {found[name]}", flush=True)
    return found


def table_of(rows: Iterable[Row]) -> str:
    """A line for each pair of releases, in Markdown."""
    lines = [
        [
            f"Python {row['python']}, torch {row['torch']}, Triton {row['triton']}",
            f"{row['passed']} passed" + (f", {row['failed']} failed" if row["failed"] else ""),
            *(row["kernels"][name] for name in (*NVIDIA, *OTHERS)),
        ]
        for row in sorted(rows, key=lambda row: (row["torch"], row["python"]), reverse=True)
    ]
    return table(["", "tests", *NVIDIA, *OTHERS], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a test failed or a kernel did not compile."""
    parser = command_line("bench.stack", __doc__, "stack")
    parser.set_defaults(results=ROOT / ".cache" / "stack")
    args = parser.parse_args(arguments)
    cpu = torch.device("cpu")
    head: Row = measurement(command_of(parser, arguments), cpu) | {"versions": {}}  # a row's: they are what is compared
    versions = {"python": platform.python_version(), "torch": version("torch"), "triton": version("triton")}
    print(f"Python {versions['python']}, torch {versions['torch']}, Triton {versions['triton']}", flush=True)
    args.results.mkdir(parents=True, exist_ok=True)
    with Recorder(result_file(args.name, device_name(cpu), args.results), ("python", "torch"), head) as recorder:
        start = time.monotonic()
        kernels, tests = compile_kernels(), run_tests()
        seconds = round(time.monotonic() - start)
        recorder.add({**versions, **tests, "kernels": kernels, "seconds": seconds})
    print(table_of(recorder.rows.values()), flush=True)
    return int(tests["failed"] > 0 or not all(kernels[name].endswith(" kernels") for name in NVIDIA))


if __name__ == "__main__":
    sys.exit(main())
