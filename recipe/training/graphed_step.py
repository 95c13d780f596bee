"""A step's device work as one CUDA graph: recorded once, then replayed by a single launch.

A small model's kernels take less time than Python needs to launch them. With a replayed graph the device never waits
for launches. Everything that varies from step to step must be data at a fixed address: the batch, the dropout key, the
learning rate. Random numbers follow the default generator's seed at the time of the replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention.gpu import capturing

# Calls before recording: the graph must not contain compilation, autotuning or lazy initialisation.
WARMUP_CALLS = 3


class GraphedStep:
    """Calls `function`, from the fourth call on by replaying it as a CUDA graph.

    function     tensors in, named tensors out. It never looks at a value, and everything else that it reads or writes
                 keeps its address. The next call overwrites its results.
    peak_bytes   peak of the memory allocated while recording: the allocator does not see replays
    """

    def __init__(self, function: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self.calls, self.peak_bytes = 0, 0
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: dict[str, Tensor] = {}

    def __call__(self, *inputs: Tensor) -> dict[str, Tensor]:
        """function(*inputs), with the same shapes in every call."""
        self.calls += 1
        if not self.inputs:
            self.inputs = tuple(tensor.clone() for tensor in inputs)
        # Already before recording: a view may start where a compiled function compiles again for a whole tensor.
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        if self.calls <= WARMUP_CALLS:
            return self._warm_up()
        if self.graph is None:
            self._record()
        self.graph.replay()  # type: ignore[union-attr]
        return self.outputs

    def release(self) -> None:
        """Drop the graph; a further call records another."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.inputs, self.outputs = None, (), {}

    def _warm_up(self) -> dict[str, Tensor]:
        """Call on the stream that will record, because autograd remembers the first stream it sees."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = self.function(*self.inputs)
        current.wait_stream(self.stream)
        return outputs

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.stream):
            self.outputs = self.function(*self.inputs)
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.graph = graph
