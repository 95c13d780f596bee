"""The end of a program: its status, all of its output, and handlers registered for the exit, but no teardown."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import atexit, signal, sys
from recipe.run import process
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
process.begin()

class Kept:
    def __del__(self):
        print("torn down")

kept = Kept()

def program():
    atexit.register(print, "at the end")
    print("begun")
    {end}

process.run(program)
"""


@pytest.mark.parametrize(
    ("end", "status", "error", "torn_down"),
    [
        ("pass", 0, "", False),
        ("sys.exit()", 0, "", False),
        ("sys.exit(130)", 130, "", False),
        ("sys.exit('a sentence')", 1, "a sentence", False),
        ("raise KeyError('unforeseen')", 1, "KeyError: 'unforeseen'", False),
        ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt", True),
    ],
)
def test_a_program_ends_as_python_would_end_it(end: str, status: int, error: str, torn_down: bool) -> None:
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout.split("\n")[:2] == ["begun", "at the end"]
    assert ("torn down" in done.stdout) == torn_down
    assert done.stderr.rstrip().endswith(error)


def test_ctrl_c_before_a_program_runs_ends_it_with_a_sentence() -> None:
    importing = PROGRAM.split("class Kept")[0] + "signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", importing], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted: nothing was started\n")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("program", ["train", "sample", "eval", "compare"])
def test_a_script_with_lines_of_windows_is_named_in_a_sentence(program: str) -> None:
    done = subprocess.run([sys.executable, f"{program}.py", "run=x\r"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: run=x ends in a carriage return")
