"""The fastest correct implementation for given sizes: `gpt-attention check --recommend`."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from ..errors import AttentionError
from .cases import Case, Inputs, draw
from .known import KNOWN
from .page import name_of, where, write
from .run import Refused, judged, results, short
from .subject import CheckError, Subject, find

TRIALS, TRIAL_S = 50, 1.0
CYCLES_PER_MS = 2e6  # of a GPU's clock, about
LAST = ("hf-flex", "hf-eager", "sdpa-math", "tiled", "naive")  # rarely the fastest, and the slowest to measure
JUDGED = {"cpu": 512, "cuda": 2048}  # the most queries and keys that are compared with fp64


class Sample(NamedTuple):
    """A case and its tensors, which all implementations share: to draw many takes seconds."""

    case: Case
    inputs: Inputs


@dataclass
class Candidate:
    """An implementation for the given sizes.

    worst    the largest error, as a share of the error that rounding explains; None where it was not compared
    forward  milliseconds of a forward pass without gradients; None where it does not run
    both     milliseconds of a forward and backward pass; None where one of them does not run
    launch   on a GPU, milliseconds in which the host launches both, or the forward where there is no backward
    why      the reason why it does not run
    """

    name: str
    worst: float | None = None
    forward: float | None = None
    both: float | None = None
    launch: float | None = None
    why: str = ""

    @property
    def correct(self) -> bool:
        return self.worst is not None and self.worst <= 1

    def row(self) -> list[str]:
        """Of one that ran, as a row of the table."""
        times = [f"{ms:.3g}" if ms is not None else "-" for ms in (self.forward, self.both, self.launch)]
        judgement = "yes" if self.correct else f"no, {self.worst:.3g} times what rounding explains"
        return [self.name, *times, judgement]


def recommend(asked: argparse.Namespace, device: torch.device) -> int:
    """Print a table and the fastest implementations. Returns the exit status, 1 where no implementation is correct."""
    case = wanted(asked.shape, asked.dtypes.split(","), asked.window, not asked.full)
    candidates = compared(case, device, [asked.target] if asked.target else [], asked.seconds)
    print(table(candidates, case, device))
    first = fastest(candidates)
    if asked.json:
        write(asked.json, as_json(candidates, case, device))
    if not first:
        print("No implementation is correct and runs here.")
        return 1
    for what, one in first.items():
        ms = one.forward if what == "forward" else one.both
        label = {"forward": "without gradients", "both": "forward and backward"}[what]
        print(f"Fastest {label}: {one.name}, {ms:.3g} ms.")
    return 0


def compared(
    case: Case, device: torch.device, others: Sequence[str] = (), seconds: float | None = None
) -> list[Candidate]:
    """All implementations with a name, judged and timed; `others` first. None starts after `seconds`."""
    started, candidates = time.monotonic(), []
    length = min(case.T, JUDGED[device.type])
    small = replace(case, T=length, S=length, B=1)
    try:
        samples = Sample(small, draw(small, device)), Sample(case, draw(case, device))
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        raise CheckError(f"The tensors of --shape do not fit the memory of {device}; choose a smaller one.") from error
    names = [*others, *(name for name in KNOWN if name not in LAST), *(name for name in LAST if name in KNOWN)]
    for n, name in enumerate(names):
        took = time.monotonic() - started
        print(f"[{n + 1}/{len(names)}] {took:4.0f} s  {name}", file=sys.stderr)
        if seconds is None or took < seconds:
            candidates.append(measured(name, *samples))
        else:
            candidates.append(Candidate(name, why="no time was left (--seconds)"))
    return candidates


def fastest(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """The fastest correct implementation of "forward" and of "both" passes, where there is one."""
    fine = [x for x in candidates if x.correct and x.forward is not None]
    trained = [x for x in fine if x.both is not None]
    first = {"forward": min(fine, key=lambda x: x.forward or 0.0)} if fine else {}
    return first | ({"both": min(trained, key=lambda x: x.both or 0.0)} if trained else {})


def as_json(candidates: Sequence[Candidate], case: Case, device: torch.device) -> str:
    """The table as JSON, with the names of the fastest implementations."""
    implementations = [asdict(x) | {"correct": x.correct} for x in ordered(candidates)]
    for one in implementations:
        if one["worst"] is not None and not math.isfinite(one["worst"]):
            one["worst"] = str(one["worst"])  # JSON has no infinity
    content = {
        "case": asdict(case),
        "where": where(device),
        "fastest": {what: one.name for what, one in fastest(candidates).items()},
        "implementations": implementations,
    }
    return json.dumps(content, indent=1, allow_nan=False)


def wanted(shape: str, dtypes: list[str], window: int | None, causal: bool) -> Case:
    """The case for a shape BxHxTxD or BxH/H_kvxTxD. Raises CheckError."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)", shape)
    if match is None:
        raise CheckError(
            f"--shape {shape} must be BxHxTxD, such as 4x16x4096x64, or BxH/H_kvxTxD, such as 4x16/4x4096x64."
        )
    B, H, H_kv, T, D = (int(x) if x else int(match[2]) for x in match.groups())
    if min(B, H, H_kv, T, D) < 1 or H % H_kv:
        raise CheckError(f"--shape {shape} needs positive numbers, and query heads a multiple of key/value heads.")
    dtype = next((x for x in ("bf16", "fp16") if x in dtypes), dtypes[0])
    return Case(T=T, S=T, D=D, B=B, H=H, H_kv=H_kv, dtype=dtype, causal=causal, window=window)


def measured(name: str, small: Sample, sample: Sample) -> Candidate:
    """Judge an implementation on the small sample, and time it on the other."""
    candidate, case = Candidate(name), sample.case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = find(name)
        except AttentionError as error:
            candidate.why = str(error)
            return candidate
        if not subject.supports(case):
            candidate.why = f"lacks {', '.join(sorted(case.features() - subject.features))}"
            return candidate
        subject.try_lse(*small)
        try:
            got = both_or_forward(subject, small)
            candidate.worst = max(verdict.share for verdict in judged(*small, got))
            candidate.forward, candidate.launch = milliseconds(subject, sample, gradients=False)
            if any(name.startswith("d") for name in got):
                candidate.both, candidate.launch = milliseconds(subject, sample, gradients=True)
        except Refused as error:
            candidate.why = str(error)
        except torch.OutOfMemoryError:
            candidate.why = "out of memory"
        except RuntimeError as error:
            candidate.why = short(error)
    return candidate


def both_or_forward(subject: Subject, sample: Sample) -> dict[str, torch.Tensor | None]:
    """The results of both passes, or of the forward where there is no backward. Raises Refused."""
    forward = results(subject, *sample, gradients=False)
    try:
        return results(subject, *sample)
    except Refused:
        return forward


def milliseconds(subject: Subject, sample: Sample, gradients: bool) -> tuple[float, float | None]:
    """The median time of a call, and on a GPU that of the host until it has launched the call. The first is left out.

    The host launches while the GPU waits, so that the first time is the GPU's alone, as in a CUDA graph.
    """
    inputs, device = sample.inputs, sample.inputs.q.device
    call = subject.prepared(*sample)
    leaves = [x.detach().requires_grad_(gradients) for x in (inputs.q, inputs.k, inputs.v)]

    def once(waiting_ms: float = 0.0) -> tuple[float, float | None]:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            torch.cuda._sleep(int(waiting_ms * CYCLES_PER_MS))
            start.record()
        began = time.perf_counter()
        with torch.set_grad_enabled(gradients):
            out = call(*leaves)[0]
            if gradients:
                torch.autograd.grad(out, leaves, inputs.do)
        took = 1000 * (time.perf_counter() - began)
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize(device)
            return start.elapsed_time(end), took
        return took, None

    once()
    _, launch = once()
    waiting_ms = 2 * (launch or 0.0)
    times = [once(waiting_ms)]
    while len(times) < TRIALS and sum(ms for ms, _ in times) < 1000 * TRIAL_S:
        times.append(once(waiting_ms))
    launches = [ms for _, ms in times if ms is not None]
    return statistics.median(ms for ms, _ in times), statistics.median(launches) if launches else None


def ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Correct ones first, by the time of both passes; those without a backward follow, by that of the forward."""
    return sorted(
        candidates, key=lambda x: (not x.correct, x.both is None, x.both or x.forward or float("inf"), x.name)
    )


def table(candidates: Sequence[Candidate], case: Case, device: torch.device) -> str:
    """Those that ran, correct ones first, ordered by their time; then the others, with the reason."""
    order = ordered(candidates)
    rows = [["", "forward ms", "both ms", "launch ms", "correct"], *(x.row() for x in order if not x.why)]
    if device.type != "cuda":
        rows = [[*row[:3], row[4]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{case.words()} on {name_of(device)}", ""]
    for first, *times, correct in rows:
        cells = [f"{time:>{width}}" for time, width in zip(times, widths[1:], strict=False)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells, correct]))
    if refused := [f"{x.name}: {x.why}" for x in order if x.why]:
        lines += ["", "Not measured:"]
        lines += [textwrap.fill(text, 118, initial_indent="  ", subsequent_indent="      ") for text in refused]
    return "\n".join([*lines, ""])
