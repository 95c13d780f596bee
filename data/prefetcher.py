"""A thread that fetches a run's batches ahead of time, and moves them to the device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from data.batches import Batch, Source

DEPTH = 3  # batches


class Prefetcher:
    """Iterates over a run's device batches in the order of (step, micro-step), prepared by a thread DEPTH ahead.

    On CUDA the tokens are copied in their small type from pinned memory, on a separate stream, and widened to int64
    there. An exception in the thread is raised in the consumer. Iteration ends with close() only.

    torch's DataLoader prefetches in worker processes, which take seconds to start, and does not copy to the device.
    """

    def __init__(self, batches: Source, device: torch.device | str, start_step: int = 0):
        self._batches, self._device = batches, torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        micro_steps = range(batches.global_batch.micro_steps)
        self._places = ((step, micro_step) for step in itertools.count(start_step) for micro_step in micro_steps)
        self._thread = ThreadPoolExecutor(1, "prefetcher")
        self._ahead = deque(self._begin() for _ in range(DEPTH))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ahead:
            raise StopIteration
        batch, arrived = self._ahead[0].result()  # an error stays there for later calls
        self._ahead.popleft()
        self._ahead.append(self._begin())
        if arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)
            for tensor in batch.tensors():
                # The memory belongs to the other stream, which must not reuse it before this stream has read it.
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> Future[tuple[Batch, torch.cuda.Event | None]]:
        return self._thread.submit(self._fetch, *next(self._places))

    def _fetch(self, step: int, micro_step: int) -> tuple[Batch, torch.cuda.Event | None]:
        stored = self._batches.stored(step, micro_step)
        if self._stream is None:
            return stored.widened(lambda x: x.to(self._device)), None
        with torch.cuda.stream(self._stream):  # also makes its device the thread's current one
            batch = stored.widened(lambda x: x.pin_memory().to(self._device, non_blocking=True))
            return batch, self._stream.record_event()
