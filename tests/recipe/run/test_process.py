"""The end of a program: its status, all of its output, and handlers registered for the exit, but no teardown."""

import signal

import pytest

from tests.programs import started

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
def test_a_program_ends_as_python_would_end_it(end, status, error, torn_down):
    done = started("-c", PROGRAM.format(end=end))
    assert done.returncode == status
    assert done.stdout.split("\n")[:2] == ["begun", "at the end"]
    assert ("torn down" in done.stdout) == torn_down
    assert done.stderr.rstrip().endswith(error)


def test_ctrl_c_before_a_program_runs_ends_it_with_a_sentence():
    done = started("-c", PROGRAM.split("class Kept")[0] + "signal.raise_signal(signal.SIGINT)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted: nothing was started\n")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("program", ["train", "sample", "eval", "compare"])
def test_a_script_with_lines_of_windows_is_named_in_a_sentence(program):
    done = started(f"{program}.py", "run=x\r")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: run=x ends in a carriage return")
