"""Capture of a test's function in a CUDA graph."""

from collections.abc import Callable
from typing import TypeVar

import torch

from attention.gpu import capturing

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of `run`, and what `run` returned: tensors that each replay overwrites."""
    stream = torch.cuda.Stream()
    # On a shared GPU the inputs of `run` may not have been computed yet: page numbers would be arbitrary.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles, which a graph must not contain
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream):
        found = run()
    return graph, found
