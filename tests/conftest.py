"""Settings that must be made before torch and Triton are imported, here and in the processes that tests start.

The slowest files come first, so that the workers finish together. xdist's workers are forks of one process that has
imported the libraries.
"""

import atexit
import contextlib
import gc
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

gc.disable()  # until the tests are collected: it would visit all that is imported, again and again

# The tests' models are small: threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch's compiler need not find out which instructions the C++ compiler knows, and starts no processes of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU the Triton kernels run in Triton's interpreter


ROOT = Path(__file__).parents[1]
FORKING = str(ROOT / "tests" / "forked")  # on PYTHONPATH: Python commands are forked


def distributes(config: pytest.Config) -> bool:
    """Whether this process lets xdist's workers run the tests."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare for tests in this process, and start the server from which commands fork; xdist's workers share it."""
    if not distributes(config):
        from tests import composing

        composing.hasten()
        if os.environ.get("TRITON_INTERPRET") == "1":
            from attention.check.interpreter import hasten

            hasten()
    if "FORK_SERVER" in os.environ:  # a worker: what it starts is not forked unless a test asks for it
        os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH", "").removeprefix(FORKING).removeprefix(os.pathsep)
        return
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    os.environ["FORK_SERVER"] = f"{folder.name}/socket"
    command = [sys.executable, "-m", "tests.forked.server", os.environ["FORK_SERVER"]]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # commands have their own
    server = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, start_new_session=True)

    def end():
        server.communicate()
        folder.cleanup()

    config.add_cleanup(end)


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Here xdist starts its workers."""
    with pytest.MonkeyPatch.context() as patch:
        if distributes(session.config):
            fork_commands(patch)
        return (yield)


def fork_commands(patch: pytest.MonkeyPatch) -> None:
    """Python commands are forked from here on, but not with a GPU, which no fork may share."""
    if not torch.cuda.is_available():
        patch.setenv("PYTHONPATH", FORKING, prepend=os.pathsep)


@pytest.fixture
def here(tmp_path):
    """The test's temporary folder, which is also the current one."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture(scope="module")
def forked():
    """From here to the module's end, Python commands are forked from a process that has imported their libraries.

    For tests whose subject is not the start of a command. With a GPU they start as always.
    """
    with pytest.MonkeyPatch.context() as patch:
        fork_commands(patch)
        yield


@pytest.fixture
def horizons(monkeypatch):
    """Gives ALiBi's calls of every length horizons; called with False, it gives none to any."""
    from attention.flash import call

    def switch(on):
        monkeypatch.setattr(call, "HORIZONS_FROM", 1 if on else math.inf)

    switch(True)
    return switch


# Files that take long, the longest first: the end of the tests is not one worker's alone.
LONGEST = [
    "test_several_ranks", "test_check", "test_submitit", "test_page", "test_flash_score", "test_resume", "test_train",
    "test_contract", "test_faults", "test_config", "test_formula", "test_recorded_runs", "test_parity_layers",
    "test_kernels", "test_context", "test_notebook", "test_experiments", "test_dropout", "test_flash",
    "test_compiled_step", "test_engine", "test_run_folder", "test_interpreter", "test_referee", "test_wandb_thread",
]  # fmt: skip
# Files of tests/model and tests/data that take more than two seconds; the others come last.
LONGER = {"test_fused_norm.py", "test_parts.py", "test_prepare.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))

    def turn(item):
        quick = item.path.parent.name in ("data", "model") and item.path.name not in LONGER
        place = LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)
        alone = item.get_closest_marker("whole_gpu") is not None  # all others would wait for its end
        return alone, place, not slow[item.path], quick

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    result = yield
    gc.freeze()  # else every later run of the collector visits all that has been imported
    atexit.register(gc.unfreeze)  # Triton 3.9 complains of what is never collected
    gc.enable()
    return result
