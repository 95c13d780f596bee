"""Settings of all tests on a GPU. `python -m pytest tests/gpu -n 16` fits one with 141 GB, `-n 12` one with 80 GB."""

import fcntl
import os
import tempfile
import zlib
from pathlib import Path

import pytest
import torch

LOCKS = Path(tempfile.gettempdir())


def pytest_configure(config):
    config.option.maxschedchunk = 1  # else tests that are quick wait for a long one, in the same process


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure as it comes: a run that is cut off later has shown it."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit counts a test's function alone, and not its wait for the GPU.

    Tests that take a minute are the first, and those that need all of the GPU the last. All others are shuffled, alike
    in every process: in the order of their files, neighbours would compile the same kernels at the same time."""

    def place(item: pytest.Item) -> tuple[bool | int, ...]:
        if item.path.parent != Path(__file__).parent:
            return (False,)
        item.add_marker(pytest.mark.timeout(300, func_only=True))
        whole = item.get_closest_marker("whole_gpu") is not None
        return True, whole, item.path.stem != "test_resume", zlib.crc32(item.nodeid.encode())

    items.sort(key=place)


@pytest.fixture(autouse=True)
def share_of_the_gpu(request):
    """Processes that run tests share the GPU and its memory. A test marked `whole_gpu` waits until all others have
    ended, and they begin when it has: it needs more than 6 GB, or measures a time. Without a GPU all are skipped."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    alone = request.node.get_closest_marker("whole_gpu") is not None
    gpu = os.open(LOCKS / f"gpu-tests-{os.getuid()}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    fcntl.flock(gpu, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
    os.close(gpu)
