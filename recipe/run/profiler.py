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

import gzip
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

WARMUP_STEPS, PROFILED_STEPS = 10, 5
WINDOW = "profiled steps"
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
CATEGORIES = tuple(DESCRIPTIONS)

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
        first = max(start, min(start + WARMUP_STEPS, steps - PROFILED_STEPS))
        self.steps = min(PROFILED_STEPS, steps - first)
        self.first: int | None = first if profile else None
        self.last: int | None = first + self.steps - 1 if profile else None
        self.recording = ExitStack()

    def start(self) -> None:
        """Start recording, before the step `first`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the library prints messages when it starts and stops
        # There is one cycle. Without acc_events torch 2.11 warns that events of earlier ones are lost.
        self.profiler = self.recording.enter_context(profile(acc_events=True))
        self._wait()
        self.recording.enter_context(record_function(WINDOW))

    def stop(self) -> dict[str, float]:
        """Stop recording, after the step `last`; write and print the results.

        Returns the percentage of the step that each category took, as metrics.
        """
        self._wait()
        self.recording.close()
        path, plain = self.folder / "trace.json.gz", self.folder / "trace.json"
        self.profiler.export_chrome_trace(str(plain))
        trace = plain.read_bytes()
        path.write_bytes(gzip.compress(trace, 6))  # torch would compress line by line, for seconds
        plain.unlink()
        events = json.loads(trace)["traceEvents"]
        times = {name: us / self.steps / 1e3 for name, us in summarise(events).items()}
        table = format_table(times)
        (self.folder / "table.txt").write_text(table)
        self.print(f"{table}trace: {path} (open it at ui.perfetto.dev)")
        total = sum(times.values())
        return {f"profile/{name}_percent": 100 * ms / total for name, ms in times.items()}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
    the backward pass, of its forward operation. On a GPU each instant counts for the running kernel, for an exchange or
    a copy only if nothing else runs, and for `data` or `idle` if nothing runs at all. On a CPU it counts for the
    operation that runs, and `idle` is Python between operations.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    window = next(e for e in complete if e["name"] == WINDOW and e["cat"] == "user_annotation")
    begin, end = window["ts"], window["ts"] + window["dur"]
    host = [e for e in complete if e.get("cat") in HOST and begin < e["ts"] < end]
    device = [e for e in complete if e.get("cat") in DEVICE]
    label(host, [e for e in events if e.get("cat") == "fwdbwd"])
    if device:
        launches = {e["args"]["correlation"]: e["category"] for e in host if "correlation" in e.get("args", {})}
        for e in device:
            named = category_of(e["name"])
            # A copy does not belong to the operation that launches it, nor a graph's kernels to its launch.
            e["category"] = named if named == "data" else launches.get(e["args"].get("correlation")) or named
        running, last = device + [e for e in host if e["name"] == "data"], ("other", "exchange", "data")
    else:
        running, last = [e for e in host if e["tid"] == window["tid"]], ("exchange", "data", "other")
    times, busy, spans = dict.fromkeys(CATEGORIES, 0.0), 0.0, list[tuple[float, float]]()
    for category in ("attention", "matmul", "loss", "optimizer", *last):  # an instant counts for the first of them
        of_category = [e for e in running if (e["category"] or "other") == category]
        spans += [(max(e["ts"], begin), min(e["ts"] + e["dur"], end)) for e in of_category]
        before, busy = busy, covered(spans)
        times[category] = busy - before
    return times | {"idle": end - begin - busy}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time within at least one of the spans, each from its start to its end."""
    total, reached = 0.0, -math.inf
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def category_of(name: str) -> str | None:
    """The category of a name, or None."""
    return next((category for category, pattern in RULES if pattern.search(name)), None)


def label(host: list[dict[str, Any]], flows: list[dict[str, Any]]) -> None:
    """Give each host event its `category`, None where neither its name nor those around it tell."""
    begins = {flow["id"]: (flow["tid"], flow["ts"]) for flow in flows if flow["ph"] == "s"}
    # (thread, time) of a backward operation -> of its forward operation
    forward_of = {(flow["tid"], flow["ts"]): begins.get(flow["id"]) for flow in flows if flow["ph"] == "f"}
    labels: dict[tuple[int, float] | None, str | None] = {}
    open_events: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in sorted(host, key=lambda e: (e["ts"], -e["dur"])):
        stack, place = open_events[e["tid"]], (e["tid"], e["ts"])
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= e["ts"]:
            stack.pop()
        category = stack[-1]["category"] if stack else None
        if category not in ENCLOSING:
            category = labels.get(forward_of.get(place)) or category_of(e["name"]) or category
        e["category"] = category
        if e["cat"] == "cpu_op":
            labels[place] = category
        stack.append(e)
