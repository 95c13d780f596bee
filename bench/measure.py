"""Times that can be compared.

Candidates are timed in turns, so that a change of the device's clocks affects all of them; the median counts. On a GPU
two events on the device take the time. Launches are queued behind a pause, so that a slow host leaves no gaps between
short kernels.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

ROUNDS = 5
MIN_SAMPLES, MAX_SAMPLES = 3, 100
LONGEST_PAUSE_S = 0.1
# The clock that `torch.cuda._sleep` counts; a slower GPU pauses for longer.
CYCLES_PER_SECOND = 2e9

Call = Callable[[], object]


class Timing(NamedTuple):
    """The median of `samples` measurements in milliseconds, and their quartiles."""

    ms: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        """The timing of samples in milliseconds, at least one."""
        low, _, high = statistics.quantiles([*samples, *samples], n=4, method="inclusive")
        return Timing(statistics.median(samples), low, high, len(samples))


def interleaved(
    candidates: Mapping[str, Callable[[], Call]], device: torch.device, seconds: float
) -> dict[str, Timing | Exception]:
    """Time the calls that each candidate prepares, in turns. A candidate that raises drops out with its exception.

    Each round has another order, because a GPU clocks lower after a candidate that takes more power.

    candidates    name -> preparation, which runs untimed before every call
    seconds       to spend on each, within MIN_SAMPLES and MAX_SAMPLES
    """
    samplers = {name: Sampler(prepare, device, seconds) for name, prepare in candidates.items()}
    failed = {}
    for round_ in range(ROUNDS + 1):
        for name in random.Random(round_).sample(list(samplers), len(samplers)):
            if name in failed:
                continue
            sampler = samplers[name]
            try:
                sampler.estimate() if round_ == 0 else sampler.take(ROUNDS + 1 - round_)
            except Exception as error:  # out of memory, most likely
                failed[name] = error
                release(device)
    return {name: failed.get(name) or Timing.of(sampler.samples) for name, sampler in samplers.items()}


def on_host(call: Call) -> float:
    """Milliseconds of a call by the host's clock."""
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


class Sampler:
    """One candidate's share of `interleaved`."""

    def __init__(self, prepare: Callable[[], Call], device: torch.device, seconds: float) -> None:
        self.prepare, self.device, self.seconds = prepare, device, seconds
        self.samples: list[float] = []
        self.wanted = 0
        self.host_s = 0.0  # how long the host is busy with one sample

    def estimate(self) -> None:
        """Choose the number of samples by the time of the second call: the first may compile."""
        for _ in range(2):
            begin = time.perf_counter()
            self.prepare()()
            self.host_s = time.perf_counter() - begin
            synchronise(self.device)
        self.wanted = min(MAX_SAMPLES, max(MIN_SAMPLES, int(self.seconds / (time.perf_counter() - begin))))

    def take(self, turns_left: int) -> None:
        """Take an equal share of the samples that are still wanted; what makes a call is not timed.

        By the host's clock, on a GPU by its own, the launches behind a pause where the queue can hold them.
        """
        count = -(-(self.wanted - len(self.samples)) // turns_left)
        if self.device.type != "cuda":
            self.samples += [on_host(self.prepare()) for _ in range(count)]
            return
        pause_s = 1.5 * count * self.host_s
        if 0 < pause_s < LONGEST_PAUSE_S:
            torch.cuda._sleep(int(pause_s * CYCLES_PER_SECOND))
        events = []
        for _ in range(count):
            call = self.prepare()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        synchronise(self.device)
        self.samples += [start.elapsed_time(stop) for start, stop in events]


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Peak bytes that `call` allocates in addition to those before it; None on a CPU, which does not count them."""
    if device.type != "cuda":
        call()
        return None
    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - before


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Free a candidate's memory, also after it ran out of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
