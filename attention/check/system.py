"""The implementation in torch: derivatives in fp64, memory, custom operators, compilation."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .calls import results_of
from .cases import Case, draw
from .memory import AllocationMeter
from .program import calling
from .results import Refused, judged, results, short
from .run import Line, Session, failed

SECTION = "in torch"
BUILTIN = {"aten", "prims", "prim", "inductor", "higher_order", "profiler", "_c10d_functional", "cuda"}
DOUBLING = (128, 256, 512, 1024)  # lengths
LARGEST_MULTIPLE = 8  # of lengths, for gradcheck, which calls once for each number of q, k and v
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
    if session.multiple > LARGEST_MULTIPLE:
        return Line(SECTION, name, "skip", f"it takes no fewer than {session.multiple} tokens, too many for this")
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


class Recorder(torch.fx.Interpreter):
    """Runs a graph, and records the arguments of the first call of each operator that is not part of torch."""

    def __init__(self, graph: torch.fx.GraphModule, calls: dict[Any, tuple[Any, Any]]) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in BUILTIN and target not in self.calls:
            self.calls[target] = tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        return super().call_function(target, args, kwargs)


def compiled_call(
    session: Session, case: Case, calls: dict[Any, tuple[Any, Any]] | None = None
) -> dict[str, Tensor | None]:
    """The results of a case through torch.compile(fullgraph=True), which generates code on a GPU only.

    calls  receives the custom operators of the graphs with their arguments; no code is generated then
    """
    # Imported here, because they import many modules.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    inputs = draw(case, session.device)

    def recording(graph: torch.fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(lambda *args: Recorder(graph, {} if calls is None else calls).run(*args))

    generated = session.device.type == "cuda" and calls is None
    backend: Any = "inductor" if generated else aot_autograd(fw_compiler=recording, bw_compiler=recording)
    torch._dynamo.reset()
    compiled: Any = torch.compile(session.subject.prepared(case, inputs), fullgraph=True, backend=backend)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    leaves = {"dq": q, "dk": k, "dv": v} if session.gradients else {}
    return results_of(lambda: compiled(q, k, v), leaves, inputs.do)


def compilation(session: Session) -> Line:
    """A compiled call is one graph without breaks, with the same results."""
    case = session.case(65)
    custom = bool(recorded(session))
    try:
        compiled = compiled_call(session, case)
    except Exception as error:
        what = f"torch.compile(fullgraph=True): {short(error)}"
        if not custom:  # plain Python may use features that a graph lacks
            return Line(SECTION, "compilation", "note", what, 1)
        lines = calling(session.subject, case, session.device)
        lines += ["torch.compile(attend, fullgraph=True, backend='aot_eager')(q, k, v)"]
        return failed(SECTION, "compilation", what, case, "\n".join(lines))
    worst = max(judged(session.subject, case, draw(case, session.device), compiled), key=lambda v: v.share)
    if worst.passes:
        return Line(SECTION, "compilation", "ok", f"one graph, within rounding ({worst.share:.2f})", 1, worst.share)
    what = f"compiled, {worst.name} of {worst.place()} is {worst.error:.3g} off ({case.words()})"
    return failed(SECTION, "compilation", what, case, share=worst.share)


def recorded(session: Session) -> dict[Any, tuple[Any, Any]]:
    """The custom operators that a compiled call reaches, with their arguments."""
    case = session.case(40, D=16, B=1)
    calls: dict[Any, tuple[Any, Any]] = {}
    with contextlib.suppress(Exception):  # a call that fails here has its own line
        compiled_call(session, case, calls)
    return calls


def operators(session: Session) -> Line:
    """torch.library.opcheck of each custom operator."""
    calls = recorded(session)
    if not calls:
        return Line(SECTION, "operators", "skip", "no custom operator")
    for operator, (args, kwargs) in calls.items():
        try:
            torch.library.opcheck(operator, args, kwargs)
        except Exception as error:
            what = f"opcheck of {operator}: {short(error)}"
            return failed(SECTION, "operators", what, case=Case())
    names = ", ".join(sorted({str(operator.overloadpacket) for operator in calls}))
    return Line(SECTION, "operators", "ok", f"opcheck passes: {names}", len(calls))


CHECKS = {"gradcheck": derivatives, "memory": memory, "compilation": compilation, "operators": operators}
