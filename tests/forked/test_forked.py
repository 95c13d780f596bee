"""A forked command behaves like a started one; those of test_resume.py and test_submitit.py get signals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SHOWS = """
import json, os, sys
variables = len(os.environ.keys() - {"PYTHONPATH"}), os.environ["GIVEN"]
path = [entry for entry in sys.path if not entry.endswith("tests/forked")]
print(json.dumps([sys.argv, os.getcwd(), variables, path, sys.stdin.read(), __name__, "torch" in sys.modules]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


def shown(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    whole, variables = [sys.executable, *command, "argument"], os.environ | {"GIVEN": "a variable"}
    done = subprocess.run(whole, cwd=folder, env=variables, input="typed", capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, no command is forked")
def test_a_forked_command_is_given_and_leaves_what_a_started_one_does(tmp_path, request):
    (tmp_path / "shows.py").write_text(SHOWS)
    commands = [["shows.py"], ["-m", "shows"], ["-c", SHOWS], ["-u", "shows.py"]]
    started = [shown(command, tmp_path) for command in commands]
    request.getfixturevalue("forked")
    forked = [shown(command, tmp_path) for command in commands]
    assert forked == [(status, out.replace("false]", "true]"), error) for status, out, error in started]
    assert forked != started
    assert {status for status, *_ in forked} == {7}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_command_whose_libraries_would_read_other_variables_is_started():
    show = "import sys; print('torch' in sys.modules)"
    printed = [
        subprocess.check_output([sys.executable, "-c", show], env=os.environ | {"OMP_NUM_THREADS": threads})
        for threads in (os.environ["OMP_NUM_THREADS"], "3")
    ]
    assert printed == ([b"False\n"] * 2 if torch.cuda.is_available() else [b"True\n", b"False\n"])
