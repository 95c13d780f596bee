"""Step time, utilisation of the device, and memory.

    meter = StepMeter(device, tokens_per_step=tokens, flops_per_token_full=full, flops_per_token_causal=causal,
                      precision="bf16")
    for step in range(start, steps):
        meter.step_start()
        for micro_step in ...:
            with meter.waiting_for_data():
                inputs, targets = next(batches)
            ...
        meter.step_end()
        if step + 1 in log points:
            metrics = meter.interval()          # metric name -> value, since the last call
        with meter.paused():
            ...                                 # evaluation, checkpoint, parity probe: not training, not counted
    summary = {"median": meter.medians(), "peak": meter.peaks()}

A step lasts from the end of the previous step to its end. Everything the loop does between two steps counts, except
under `paused`. On a GPU the ends are events in the stream, read back at `interval` only, so the host never waits for
the device in between. The first steps (allocation, compilation, autotuning) do not count.

Model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B) is the FLOPs of the model's arithmetic over those
that the device could do in the same time. There are two conventions: `full` counts attention as if every query
saw every key, as most published figures do; `causal` counts the visible keys only.
"""

import resource
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GIB = 2**30


class Clock:
    """The host's clock, for a device that works while its caller waits."""

    def mark(self) -> Any:
        """The point that the device has reached when it has done everything asked of it so far."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks; may wait for `end` to be reached."""
        return end - start


class CudaClock(Clock):
    """Events in the current stream of a GPU, which runs behind its caller."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class StepMeter:
    """Times steps and their waits for data; see the module's docstring for the order of calls.

    tokens_per_step         over all devices
    flops_per_token_full    forward and backward, with every query and key
    flops_per_token_causal  the same, with visible keys only
    precision               of the matrix products: bf16, fp16, tf32 or fp32
    device_count            devices that share the step
    warmup_steps            steps of this process that are not counted
    clock                   of the device's kind by default
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tokens_per_step: int,
        flops_per_token_full: float,
        flops_per_token_causal: float,
        precision: str,
        device_count: int = 1,
        warmup_steps: int = 3,
        clock: Clock | None = None,
    ) -> None:
        self.device = device
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = {"full": flops_per_token_full, "causal": flops_per_token_causal}
        self.precision, self.peak = precision, peak_flops(device_name(device), precision)
        self.device_count = device_count
        self.clock = clock or (CudaClock(device) if device.type == "cuda" else Clock())

        self._warmup_left = warmup_steps
        self._start: Any = None  # start of the current step: the end of the last one, unless paused
        self._waited = 0.0  # host seconds spent waiting for data in the current step
        self._pending: list[tuple[Any, Any, float]] = []  # (start, end, waited), not read back yet
        self._step_seconds, self._data_seconds = array("d"), array("d")  # of every step
        self._peak_bytes = {"allocated": 0, "reserved": 0}  # since the last interval, pauses left out
        self._peaks: dict[str, float] = {}  # of every interval
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def step_start(self) -> None:
        """Call when the loop begins a step."""
        if self._start is None:
            self._start = self.clock.mark()
        self._waited = 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Enter around every call that may wait for a batch."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def step_end(self) -> None:
        """Call after the last work of a step has been launched."""
        end = self.clock.mark()
        if self._warmup_left:
            self._warmup_left -= 1
        elif self._start is not None:  # steps with a pause inside do not count
            self._pending.append((self._start, end, self._waited))
        self._start = end

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Enter around work that is not training: neither its time nor its memory counts."""
        self._note_memory()
        try:
            yield
        finally:
            self._start = None
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)

    def interval(self, replayed_bytes: int = 0) -> dict[str, float]:
        """Means over the steps since the last call, and the peaks of memory; then both start again.

        replayed_bytes   peak memory of a replayed CUDA graph, which the allocator does not see

        The throughput is absent while all of them were warm-up, MFU where the device's peak is unknown. On a CPU the
        memory is the process's, at its peak since it started. Waits for the device to finish the last step.
        """
        steps = [self.clock.seconds(start, end) for start, end, _ in self._pending]
        waits = [waited for _, _, waited in self._pending]
        self._pending.clear()
        self._step_seconds.extend(steps)
        self._data_seconds.extend(waits)

        self._note_memory()
        self._peak_bytes["allocated"] = max(self._peak_bytes["allocated"], replayed_bytes)
        memory = {f"memory/peak_{kind}_gib": b / GIB for kind, b in self._peak_bytes.items() if b}
        self._peak_bytes = dict.fromkeys(self._peak_bytes, 0)
        for name, value in memory.items():
            self._peaks[name] = max(value, self._peaks.get(name, 0.0))
        return self._throughput(statistics.fmean(steps), statistics.fmean(waits)) | memory if steps else memory

    def medians(self) -> dict[str, float]:
        """The median step of the run, as the names that `interval` uses; empty where every step was warm-up."""
        if not self._step_seconds:
            return {}
        return self._throughput(statistics.median(self._step_seconds), statistics.median(self._data_seconds))

    def peaks(self) -> dict[str, float]:
        """The highest memory of the run's intervals."""
        return dict(self._peaks)

    def _throughput(self, step_seconds: float, data_seconds: float) -> dict[str, float]:
        tokens_per_second = self.tokens_per_step / step_seconds
        metrics = {
            "throughput/tokens_per_s": tokens_per_second,
            "throughput/step_ms": step_seconds * 1e3,
            "throughput/data_ms": data_seconds * 1e3,
        }
        if self.peak is not None:
            for convention, flops in self.flops_per_token.items():
                metrics[f"throughput/mfu_{convention}"] = tokens_per_second * flops / (self.peak * self.device_count)
        return metrics

    def _note_memory(self) -> None:
        """Take the allocator's peaks into the interval's, and reset them; this does not touch the device."""
        if self.device.type != "cuda":
            self._peak_bytes["allocated"] = process_peak()
            return
        for kind, peak in (
            ("allocated", torch.cuda.max_memory_allocated),
            ("reserved", torch.cuda.max_memory_reserved),
        ):
            self._peak_bytes[kind] = max(self._peak_bytes[kind], peak(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)


def process_peak() -> int:
    """Bytes of this process in memory, at their peak since it started."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_name(device: torch.device) -> str:
    """The device's name as its driver gives it; "cpu" for the host."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# Dense peak in TFLOP/s: bf16 and fp16, tf32, and fp32 (outside the tensor cores), by NVIDIA's datasheet or architecture
# whitepaper; half of the figure where a datasheet assumes sparsity. GeForce: fp16 with fp32 accumulation, which
# is what torch uses. None: the device has no tf32, and no bf16 either.
_H100_SXM = (989.4, 494.7, 66.9)  # H100 whitepaper, H100 SXM5
_H100_PCIE = (756.0, 378.0, 51.2)  # H100 whitepaper, H100 PCIe
_HOPPER_NVL = (835.5, 417.5, 60.0)  # H100 NVL and H200 NVL datasheets
_A100 = (312.0, 156.0, 19.5)  # A100 datasheet, the same for SXM and PCIe
_V100_SXM = (125.0, None, 15.7)  # V100 datasheet
_V100_PCIE = (112.0, None, 14.0)

_PEAKS: dict[str, tuple[float, float | None, float]] = {
    "GB200": (2500.0, 1250.0, 80.0),  # GB200 NVL72 datasheet, a GPU's half of the superchip
    "B200": (2250.0, 1125.0, 75.0),  # HGX B200 datasheet, an eighth
    "H200": _H100_SXM,  # H200 datasheet: the H100's chip with more memory
    "H200 NVL": _HOPPER_NVL,
    "GH200 480GB": _H100_SXM,  # GH200 datasheet
    "GH200 96GB HBM3": _H100_SXM,
    "GH200 144G HBM3e": _H100_SXM,
    "H100 80GB HBM3": _H100_SXM,
    "H100 PCIe": _H100_PCIE,
    "H100 NVL": _HOPPER_NVL,
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100-PCIE-80GB": _A100,
    "A100 80GB PCIe": _A100,
    "A40": (149.7, 74.8, 37.4),  # A40 datasheet
    "A10": (125.0, 62.5, 31.2),  # A10 datasheet
    "L4": (121.0, 60.0, 30.3),  # L4 datasheet
    "L40": (181.05, 90.5, 90.5),  # L40 datasheet
    "L40S": (362.05, 183.0, 91.6),  # L40S datasheet
    "RTX A6000": (154.8, 77.4, 38.7),  # RTX A6000 datasheet and GA102 whitepaper
    "RTX 6000 Ada Generation": (364.2, 182.1, 91.1),  # Ada whitepaper
    "GeForce RTX 3090": (71.0, 35.6, 35.6),  # GA102 whitepaper
    "GeForce RTX 4090": (165.2, 82.6, 82.6),  # Ada whitepaper
    "GeForce RTX 5090": (209.5, 104.8, 104.8),  # RTX Blackwell whitepaper
    "V100-SXM2-16GB": _V100_SXM,
    "V100-SXM2-32GB": _V100_SXM,
    "V100-PCIE-16GB": _V100_PCIE,
    "V100-PCIE-32GB": _V100_PCIE,
    "T4": (65.0, None, 8.1),  # T4 datasheet
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device in `precision` (bf16, fp16, tf32 or fp32), dense; None for a device that is not known.

    The name has to match as a whole: a laptop's RTX 4090, or a MIG slice of an H100, is another device.
    """
    half, tf32, fp32 = _PEAKS.get(device_name.removeprefix("NVIDIA ").removeprefix("Tesla "), (None, None, None))
    teraflops = {"bf16": half if tf32 else None, "fp16": half, "tf32": tf32, "fp32": fp32}[precision]
    return None if teraflops is None else teraflops * 1e12


def product_precision(precision: str, allow_tf32: bool) -> str:
    """The precision of the peak for MFU, where the model computes in `precision`: tf32 instead of fp32 as soon as some
    products may use it (attention.allow_tf32, or torch's setting), so that MFU is never overstated."""
    rounded = allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    return "tf32" if precision == "fp32" and rounded else precision


def describe_peak(device_name: str, precision: str) -> str:
    """A sentence on the peak that MFU is measured against, or on its absence."""
    peak = peak_flops(device_name, precision)
    if peak is None:
        return f"unknown device for MFU: no peak of {device_name} in {precision} is on record"
    return f"{peak / 1e12:.0f} TFLOP/s ({device_name}, {precision}, dense)"
