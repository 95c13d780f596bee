"""CUDA graphs of what a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from attention.gpu import capturing

T = TypeVar("T")


def captured(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of a function, and what it returns: tensors that each replay fills again."""
    stream = torch.cuda.Stream()
    # On a GPU that others share, what `run` reads may not have been computed yet: page numbers would be any.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles, which a graph must not contain
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream):
        found = run()
    return graph, found
