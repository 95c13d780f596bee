"""What has to be chosen before torch and Triton are imported, here and in the processes that tests start.

Files that take long, most of which wait for other processes, come first: the workers then end together.
"""

import os

import pytest

# The tests' models are small: threads would wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU the Triton kernels run in Triton's interpreter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not {item.path.parent.name} & {"tests", "training"})
