"""The implementation in torch: derivatives in fp64, memory, compilation, CUDA graphs."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .behaviour import same
from .calls import results_of
from .cases import Case, draw
from .memory import AllocationMeter
from .program import calling
from .results import Refused, judged, results, short
from .run import Line, Session, failed

SECTION = "in torch"
DOUBLING = (128, 256, 512, 1024)  # lengths
SLOW_S = 2.0  # no longer length is tried after a call that takes so many seconds


def derivatives(session: Session) -> Line:
    """torch.autograd.gradcheck, if the implementation takes fp64."""
    name, subject, calls = "gradcheck", session.subject, 0
    if not session.gradients:
        return Line(SECTION, name, "skip", f"no gradients: {session.no_gradients}")
    cases = [
        Case(T=5, S=5, D=3, H=4, H_kv=session.kv_heads(4)),
        Case(T=3, S=7, D=4),
        Case(T=6, S=6, D=4, window=2),
        Case(T=6, S=6, D=4, soft_cap=1.5),
        Case(T=6, S=6, D=4, alibi=True, sinks=True),
        Case(T=7, S=7, D=4, documents=(3, 4)),
    ]
    for case in session.timely(session.fitting(replace(case, dtype="fp64", seed=session.seed)) for case in cases):
        if not subject.supports(case):
            continue
        inputs = draw(case, session.device)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

        def out(*x: Tensor, case: Case = case) -> Tensor:
            return subject(case, draw(case, session.device).changed(**dict(zip("qkv", x, strict=True))))[0]

        try:
            got = out(*leaves).detach()
        except Exception as error:
            if not calls:
                return Line(SECTION, name, "skip", f"fp64 is not taken: {short(error)}")
            continue
        (verdict,) = judged(subject, case, inputs, {"out": got})
        if not verdict.passes and verdict.error < 1e-5:
            return Line(SECTION, name, "skip", f"fp64 is computed in less: out is {verdict.error:.1g} off")
        calls += 1
        try:
            torch.autograd.gradcheck(out, leaves, fast_mode=True)
        except Exception as error:  # of gradcheck, or of the backward pass
            what = f"{short(error)} ({case.words()})"
            lines = calling(subject, case, session.device)
            lines += ["x = [t.requires_grad_() for t in (q, k, v)]", "assert torch.autograd.gradcheck(attend, x)"]
            return failed(SECTION, name, what, case, "\n".join(lines), calls)
    if not calls:
        return Line(SECTION, name, "skip", "no time was left")
    return Line(SECTION, name, "ok", "gradients are the derivatives of out, in fp64", calls)


def memory(session: Session) -> Line:
    """How memory grows with the length, forward and backward."""
    sizes: dict[int, int] = {}
    for T in DOUBLING:
        started = time.monotonic()
        case = Case(T=T, S=T, D=32, B=1, H=2, H_kv=2, dtype=session.dtypes[0], causal=True)
        inputs = draw(case, session.device)
        try:
            results(session.subject, case, inputs, session.gradients)  # allocates what later calls reuse
            sizes[T] = peak(session, case)
        except Refused as error:
            return Line(SECTION, "memory", "skip", f"refused: {error}")
        if len(sizes) > 1 and time.monotonic() - started > SLOW_S:
            break
    T = max(sizes)
    power = math.log2(max(sizes[T], 1) / max(sizes[T // 2], 1))
    passes = "forward and backward" if session.gradients else "forward"
    detail = f"grows with length^{power:.1f}: {sizes[T] / 2**20:.1f} MiB at {T} ({passes}, 2 heads of 32)"
    return Line(SECTION, "memory", "note", detail, len(sizes))


def peak(session: Session, case: Case) -> int:
    """Bytes at the peak of a call, above its inputs."""
    inputs = draw(case, session.device)
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
        torch.cuda.reset_peak_memory_stats(session.device)
        before = torch.cuda.memory_allocated(session.device)
        results(session.subject, case, inputs, session.gradients)
        return torch.cuda.max_memory_allocated(session.device) - before
    with AllocationMeter() as meter:
        results(session.subject, case, inputs, session.gradients)
    return meter.peak


def compilation(session: Session) -> Line:
    """A compiled call is one graph without breaks, with the same results. Code is generated on a GPU only."""
    case = session.case(65)
    inputs = draw(case, session.device)
    leaves = {f"d{name}": getattr(inputs, name).detach() for name in "qkv"}
    torch._dynamo.reset()
    backend = "inductor" if session.device.type == "cuda" else "aot_eager"
    call: Any = torch.compile(session.subject.prepared(case, inputs), fullgraph=True, backend=backend)
    try:
        compiled = results_of(lambda: call(*leaves.values()), leaves if session.gradients else {}, inputs.do)
    except Exception as error:  # Python may use features that a graph lacks
        return Line(SECTION, "compilation", "note", f"torch.compile(fullgraph=True): {short(error)}", 1)
    worst = max(judged(session.subject, case, inputs, compiled), key=lambda v: v.share)
    if worst.passes:
        return Line(SECTION, "compilation", "ok", f"one graph, within rounding ({worst.share:.2f})", 1, worst.share)
    what = f"compiled, {worst.name} of {worst.place()} is {worst.error:.3g} off ({case.words()})"
    return failed(SECTION, "compilation", what, case, share=worst.share)


def graph(session: Session) -> Line:
    """A captured call, replayed with other values in the same tensors, gives the results of an ordinary call."""
    name, subject = "CUDA graph", session.subject
    if session.device.type != "cuda":
        return Line(SECTION, name, "skip", "needs a CUDA GPU")
    case = session.case(256, dtype=session.dtypes[-1], D=64, H_kv=4)  # in 16 bits, where the implementation takes them
    inputs = draw(case, session.device)
    other = draw(replace(case, seed=case.seed + 1), session.device).changed(do=inputs.do)
    leaves = {f"d{name}": getattr(inputs, name).detach().clone() for name in "qkv"}
    call = subject.prepared(case, inputs)

    def both() -> dict[str, Tensor | None]:
        return results_of(lambda: call(*leaves.values()), leaves if session.gradients else {}, inputs.do)

    try:
        expected = results(subject, case, other, session.gradients)
        side = torch.cuda.Stream(session.device)
        side.wait_stream(torch.cuda.current_stream(session.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                both()
        torch.cuda.current_stream(session.device).wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            made = both()
        with torch.no_grad():
            for leaf, x in zip(leaves.values(), (other.q, other.k, other.v), strict=True):
                leaf.copy_(x)
        captured.replay()
        torch.cuda.synchronize(session.device)
    except Exception as error:
        what = f"cannot be captured: {short(error)}"
        lines = calling(subject, case, session.device)
        lines += ["attend(q, k, v)", "with torch.cuda.graph(torch.cuda.CUDAGraph()):", "    attend(q, k, v)"]
        return failed(SECTION, name, what, case, "\n".join(lines))
    if all(same(x, expected[name]) for name, x in made.items()):
        return Line(SECTION, name, "ok", "bit for bit", 1)
    worst = max(judged(subject, case, other, made), key=lambda v: v.share)
    if worst.passes:
        return Line(SECTION, name, "ok", "within rounding, not bit for bit", 1, worst.share)
    what = f"{worst.name} of {worst.place()} is {worst.error:.3g} off ({case.words()})"
    return failed(SECTION, name, what, case, share=worst.share)


CHECKS = {"gradcheck": derivatives, "memory": memory, "compilation": compilation, "CUDA graph": graph}
