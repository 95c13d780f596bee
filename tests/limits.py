"""Limits that the system sets, for tests of what happens at them."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: writing more fails as on a full disk, with another reason."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def data_gib() -> float:
    """GiB of data that this process has, which grow with the tests that ran in it."""
    return int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) / 2**20
