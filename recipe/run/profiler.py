"""The time of a training step by category.

    profiler = Profiler(run_folder, device, profile=True, start=start, steps=steps)
    for step in range(start, steps):
        if step == profiler.first:
            profiler.start()
        ...                                     # the step
        if step == profiler.last:
            metrics |= profiler.stop()          # {"profile/attention_percent": 19.2, ...}

A few steps, after compilation and warm-up, are recorded by torch's profiler. `profile/trace.json.gz` in the run
folder opens in chrome://tracing or ui.perfetto.dev; `profile/table.txt` sums it up.

The trace is read here, because torch's `key_averages` adds up times by an operator's name: a product within attention
would count as a linear layer, a backward kernel as its autograd node, two kernels that run at once would count twice,
and idle time not at all.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WARMUP_STEPS, PROFILED_STEPS = 10, 5
WINDOW = "profiled steps"
CATEGORIES = ("attention", "matmul", "loss", "optimizer", "data", "other", "exchange", "idle")
DESCRIPTIONS = {
    "attention": "scores, softmax, dropout, values; forward and backward",
    "matmul": "linear layers",
    "loss": "the vocabulary's logits, cross-entropy and their gradients",
    "optimizer": "gradient norm and update",
    "data": "waiting for batches, and copies to the device that nothing else hides",
    "other": "norms, activations, residual stream, embeddings, casts",
    "exchange": "between ranks, where nothing else runs; attention across ranks counts as attention",
    "idle": "nothing runs on the device",
}

# The category of an operation or kernel by its name; the first match counts. Names in the model's code
# (`record_function`) and of its custom ops come first, then torch's, then kernels'.
RULES = tuple(
    (category, re.compile(pattern))
    for category, pattern in (
        ("exchange", r"nccl|gloo|c10d|FSDP::|fsdp::"),
        ("loss", r"^loss$|cross_entropy|softmax_gradient|nll_loss|_log_softmax"),
        ("attention", r"^attention$|attend|attention|flash|fmha|bmm|baddbmm|logsumexp|softmax"),
        ("optimizer", r"^optimizer|^Optimizer\.|adam|_foreach_|vector_norm|multi_tensor"),
        ("data", r"^data$|Memcpy HtoD"),
        ("matmul", r"^aten::(mm|addmm|linear|matmul)$|gemm|nvjet|cutlass|xmma|cublas|splitKreduce"),
    )
)
# Operations inside one of these belong to its category, such as a matrix product of attention.
ENCLOSING = ("attention", "loss", "optimizer", "data")
# torch's names for the events of the host and of the device in a trace.
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float, str]  # from, to, category


class Profiler:
    """Records some steps of a run, once.

    first, last   the steps to record; None where nothing is asked for
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        profile: bool,
        start: int,
        steps: int,
        print: Callable[[str], None] = print,
    ) -> None:
        """The steps recorded are PROFILED_STEPS after WARMUP_STEPS, or earlier in a run of fewer `steps`."""
        self.folder, self.device, self.print = folder / "profile", device, print
        self.first: int | None = None
        self.last: int | None = None
        if profile:
            self.first = max(start, min(start + WARMUP_STEPS, steps - PROFILED_STEPS))
            self.last = min(self.first + PROFILED_STEPS, steps) - 1
        self.recording = ExitStack()

    def start(self) -> None:
        """Start recording, before the step `first`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the library prints messages when it starts and stops
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.profiler = self.recording.enter_context(profile(activities=activities))
        self._wait()
        self.recording.enter_context(record_function(WINDOW))

    def stop(self) -> dict[str, float]:
        """Stop recording, after the step `last`; write and print the results.

        Returns the percentage of the step that each category took, as metrics.
        """
        assert self.first is not None
        assert self.last is not None
        self._wait()
        self.recording.close()
        path, plain = self.folder / "trace.json.gz", self.folder / "trace.json"
        self.profiler.export_chrome_trace(str(plain))
        with plain.open("rb") as trace, gzip.open(path, "wb", compresslevel=6) as compressed:
            shutil.copyfileobj(trace, compressed, 1 << 20)  # torch would compress line by line, for seconds
        plain.unlink()
        steps = self.last - self.first + 1
        times = {name: us / steps / 1e3 for name, us in summarise(read_trace(path)).items()}
        table = format_table(times)
        (self.folder / "table.txt").write_text(table)
        self.print(f"{table}trace: {path} (open it at ui.perfetto.dev)")
        total = sum(times.values())
        return {f"profile/{name}_percent": 100 * ms / total for name, ms in times.items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace in Chrome's format, gzipped."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def format_table(times: dict[str, float]) -> str:
    """Milliseconds per step by category, with percentages of the step, as text; leaves out categories without time."""
    total = sum(times.values())
    lines = [f"{'step':<10} {total:8.2f} ms"]
    for name in filter(times.get, CATEGORIES):
        lines.append(f"{name:<10} {times[name]:8.2f} ms {100 * times[name] / total:5.1f} %   {DESCRIPTIONS[name]}")
    return "\n".join(lines) + "\n"


def summarise(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of the profiled window by category; together they are the window.

    A kernel belongs to the operation that launched it. An operation belongs to the category of the enclosing one or, in
    the backward pass, of its forward operation. On a GPU each instant counts for the running kernel, for a copy only if
    nothing else runs, and for `data` or `idle` if nothing runs at all. On a CPU each operation counts without those it
    calls, and `idle` is Python between operations.
    """
    host = [e for e in events if e.get("ph") == "X" and e.get("cat") in HOST]
    window = next(e for e in host if e["name"] == WINDOW and e["cat"] == "user_annotation")
    begin, end = window["ts"], window["ts"] + window["dur"]
    host = [e for e in host if begin < e["ts"] < end]
    device = [e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE]
    label(host, [e for e in events if e.get("cat") == "fwdbwd"])
    if device:
        launches = {e["args"]["correlation"]: e["category"] for e in host if "correlation" in e.get("args", {})}
        spans = []
        for e in device:
            named = category_of(e["name"])
            # A copy does not belong to the operation that launches it, nor a graph's kernels to its launch.
            launched_for = launches.get(e["args"].get("correlation"))
            category = named if named == "data" else launched_for or named or "other"
            spans.append((e["ts"], e["ts"] + e["dur"], category))
        waits = [(e["ts"], e["ts"] + e["dur"], "waiting") for e in host if e["name"] == "data"]
        return sweep(spans, waits, begin, end)

    times = dict.fromkeys(CATEGORIES, 0.0)
    for e in host:
        if e["tid"] == window["tid"]:
            times[e["category"] or "other"] += e["self"]
    times["idle"] = end - begin - sum(times.values())
    return times


def category_of(name: str) -> str | None:
    """The category of a name, or None."""
    return next((category for category, pattern in RULES if pattern.search(name)), None)


def label(host: list[dict[str, Any]], flows: list[dict[str, Any]]) -> None:
    """Give each host event its `category` and `self` time, the time not spent in events nested in it."""
    host.sort(key=lambda e: (e["ts"], -e["dur"]))
    forward_of: dict[tuple[int, float], tuple[int, float]] = {}  # backward (thread, time) -> forward (thread, time)
    begins = {f["id"]: (f["tid"], f["ts"]) for f in flows if f["ph"] == "s"}
    for flow in flows:
        if flow["ph"] == "f" and flow["id"] in begins:
            forward_of[flow["tid"], flow["ts"]] = begins[flow["id"]]

    labels: dict[tuple[int, float], str | None] = {}
    open_events: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in host:
        stack = open_events[e["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= e["ts"]:
            stack.pop()
        outer = stack[-1] if stack else None
        inherited = outer["category"] if outer else None
        here = (e["tid"], e["ts"])
        if inherited not in ENCLOSING:
            inherited = labels.get(forward_of.get(here, here)) or category_of(e["name"]) or inherited
        e["category"] = inherited
        e["self"] = e["dur"]
        if outer:
            outer["self"] -= e["dur"]
        if e["cat"] == "cpu_op":
            labels[here] = inherited
        stack.append(e)


def sweep(spans: Iterable[Span], waits: Iterable[Span], begin: float, end: float) -> dict[str, float]:
    """Each instant of [begin, end] counted once: for a running kernel, else a copy, else a wait for data, else idle."""
    ranks = [name for name in CATEGORIES if name not in ("data", "idle")] + ["data", "waiting"]
    points: list[tuple[float, str, int]] = [(end, "idle", 0)]
    for start, stop, name in [*spans, *waits]:
        points += [(min(max(start, begin), end), name, 1), (min(max(stop, begin), end), name, -1)]
    running = dict.fromkeys([*ranks, "idle"], 0)
    times = dict.fromkeys(CATEGORIES, 0.0)
    now = begin
    for at, name, change in sorted(points):
        busy = next((r for r in ranks if running[r]), "idle")
        times["data" if busy == "waiting" else busy] += at - now
        running[name] += change
        now = at
    return times
