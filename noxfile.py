"""The supported releases of torch, each with its Triton, and of Python: `make stack`, or `nox` with nox's own options.

    nox --list                                the pairs
    nox -k 'torch_2_15 and python_3_14'       one of them

Each pair has an environment of its own, removed when its session ends. bench.stack runs in it, and adds a row to
bench/results/: with all of its tests for the pairs of WHOLE, and with a few that use each library for the others. A run
that was stopped goes on where it stopped: a pair that passed at this commit is skipped, and so is a Python that this
machine does not have; uv can install most. What is downloaded stays in .nox/ until another release of torch has its
turn: up to 25 GB.
"""

import json
import shutil
import subprocess
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = False
PYTHONS = ("3.14", "3.13", "3.12", "3.11")
TORCHES = ("2.15", "2.14", "2.13", "2.12", "2.11")
PAIRS = [
    nox.param(python, torch, id=f"torch_{torch.replace('.', '_')}-python_{python.replace('.', '_')}")
    for torch in TORCHES
    for python in PYTHONS
]
# All tests: from the newest pair to the oldest with each release once, and newest torch with oldest Python and back.
WHOLE = {("3.14", "2.15"), ("3.13", "2.14"), ("3.12", "2.13"), ("3.12", "2.12"), ("3.11", "2.11")}
WHOLE |= {("3.11", "2.15"), ("3.14", "2.11")}


def passed(python: str, torch: str) -> bool:
    """Whether bench/results/ has a row of a pair's tests at this commit, without a failure."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    for path in Path("bench/results").glob("stack-tests-*.json"):
        content = json.loads(path.read_text())
        for row in content["rows"]:
            pair = row["python"].startswith(f"{python}.") and row["torch"].startswith(f"{torch}.")
            head = content["measurements"][row["measurement"]]
            enough = not row["smoke"] or (python, torch) not in WHOLE
            if pair and enough and not row["failed"] and head["commit"] == commit and not head["dirty"]:
                return True
    return False


def cache_of(torch: str) -> Path:
    """The folder for what uv downloads for a release of torch; those of other releases are removed."""
    folder = Path(".nox", f"cache-{torch}").absolute()
    for other in folder.parent.glob("cache-*"):
        if other != folder:
            shutil.rmtree(other)
    return folder


@nox.session
@nox.parametrize("python,torch", PAIRS)
def stack(session: nox.Session, torch: str) -> None:
    """A selection of the tests, and the kernels compiled for several GPUs."""
    python = str(session.python)
    try:
        if passed(python, torch):
            session.skip("passed at this commit")
        # Triton 3.6's interpreter turns arrays of one element into numbers, which NumPy 2.4 refuses.
        packages = [f"torch=={torch}.*", "-e", ".[dev]", *(["numpy<2.4"] if torch == "2.11" else [])]
        session.install(*packages, env={"UV_CACHE_DIR": str(cache_of(torch))})
        smoke = [] if (python, torch) in WHOLE else ["--smoke"]
        session.run("python", "-m", "bench.stack", *smoke, *session.posargs)
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
