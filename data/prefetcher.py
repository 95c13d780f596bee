"""A thread that fetches a run's batches ahead of time, and moves them to the device."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import torch

from data.batches import Batch, Source, Stored


class Prefetcher:
    """Iterates over a run's device batches in the order of (step, micro-step), prepared by a thread `depth` ahead.

    On CUDA the tokens are copied in their small type from pinned memory, on a separate stream, and widened to int64
    there. An exception in the thread is raised in the consumer. Iteration ends with close() only.

    torch's DataLoader prefetches in worker processes, which take seconds to start, and does not copy to the device.
    """

    def __init__(self, batches: Source, device: torch.device | str, start_step: int = 0, depth: int = 3):
        self._batches, self._device, self._step = batches, torch.device(device), start_step
        if self._device.type == "cuda" and self._device.index is None:  # each thread has a separate current device
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._ready: SimpleQueue[tuple[Batch, torch.cuda.Event | None] | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="prefetcher", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # for later calls
            raise item
        self._room.release()
        batch, arrived = item
        if arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrived)
            for tensor in batch.tensors():
                # The memory belongs to the other stream, which must not reuse it before this stream has read it.
                tensor.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        try:
            stream = None
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                stream = torch.cuda.Stream(self._device)
            for step in itertools.count(self._step):
                for micro_step in range(self._batches.global_batch.micro_steps):
                    self._room.acquire()
                    if self._closed:
                        return
                    self._ready.put(self._move(self._batches.stored(step, micro_step), stream))
        except BaseException as error:
            self._ready.put(error)

    def _move(self, stored: Stored, stream: torch.cuda.Stream | None) -> tuple[Batch, torch.cuda.Event | None]:
        if stream is None:
            return stored.batch(lambda x: x.to(self._device)), None
        with torch.cuda.stream(stream):
            batch = stored.batch(lambda x: x.pin_memory().to(self._device, non_blocking=True))
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return batch, arrived
