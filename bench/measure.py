"""What every benchmark needs: where and when it was measured, and times that can be compared.

Contestants are timed in turns, so that a change of the device's clocks hits all of them, and what counts is the
median. On a GPU the time is the device's own, between two events: launches are queued up behind a pause, so that a
slow Python does not leave gaps between short kernels.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
ROUNDS = 5
MIN_SAMPLES, MAX_SAMPLES = 3, 100
LONGEST_PAUSE_S = 0.1
# What `torch.cuda._sleep` counts in; a GPU whose clock is slower pauses for longer.
CYCLES_PER_SECOND = 2e9

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The median of `samples` measurements in milliseconds, and their quartiles."""

    ms: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        low, _, high = statistics.quantiles([*samples, *samples], n=4, method="inclusive")
        return Timing(statistics.median(samples), low, high, len(samples))

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def environment(device: torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """The device, the versions of what ran on it, the commit, and the time: what a result needs to be repeated.

    packages   whose versions are to be recorded where they are installed, beside torch and triton
    """
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else cpu_name(),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if cuda else None,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            **{name: version(name) for name in ("triton", *packages) if version(name)},
        },
        "git": {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """The processor as the system calls it, and how many threads torch uses of it."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return f"{found[1] if found else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git(*arguments: str) -> str | None:
    """What git says about this checkout; None where it cannot."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def slug(device: str) -> str:
    """A device's name as part of a file name: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def interleaved(
    contestants: Mapping[str, Callable[[], Call]], device: torch.device, seconds: float
) -> dict[str, Timing]:
    """Time what each contestant's preparation returns, in turns.

    contestants   name -> preparation, which is run anew, untimed, at each of the contestant's turns
    seconds       spent on each, so far as MIN_SAMPLES and MAX_SAMPLES allow
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    wanted: dict[str, int] = {}
    host_s: dict[str, float] = {}
    for name, prepare in contestants.items():
        call = prepare()
        call()
        synchronise(device)
        begin = time.perf_counter()
        call()
        host_s[name] = time.perf_counter() - begin
        synchronise(device)
        estimate = time.perf_counter() - begin
        wanted[name] = min(MAX_SAMPLES, max(MIN_SAMPLES, int(seconds / estimate)))
        del call
    for turn in range(ROUNDS):
        for name, prepare in contestants.items():
            count = -(-(wanted[name] - len(samples[name])) // (ROUNDS - turn))
            if count > 0:
                samples[name] += measured(prepare(), device, count, host_s[name])
    return {name: Timing.of(found) for name, found in samples.items()}


def measured(call: Call, device: torch.device, count: int, host_s: float) -> list[float]:
    """Milliseconds of each of `count` calls, which keep the host busy for `host_s` each."""
    if device.type != "cuda":
        found = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - begin))
        return found
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    pause_s = 1.5 * count * host_s
    if pause_s < LONGEST_PAUSE_S:
        torch.cuda._sleep(int(pause_s * CYCLES_PER_SECOND))
    for start, stop in events:
        start.record()
        call()
        stop.record()
    synchronise(device)
    return [start.elapsed_time(stop) for start, stop in events]


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Bytes that `call` had allocated at its peak above what was there before; None on a CPU, which does not count."""
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
    """Give back what a contestant held, also after it ran out of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def write(path: Path, text: str) -> None:
    """Replace a file in one step: an interruption leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
