"""The implementation in torch: derivatives in fp64, compilation, CUDA graphs, tensors of more than 2^31 elements."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from .behaviour import same
from .calls import results_of
from .cases import DTYPES, Case, Inputs, draw
from .judge import worst_of
from .program import calling
from .results import Refused, judged, results, short
from .run import Line, Session, failed

SECTION = "in torch"
LARGE_TENSORS = 13  # inputs, outputs, gradients, and room for an implementation's own


def derivatives(session: Session) -> Line:
    """torch.autograd.gradcheck, if the implementation takes fp64."""
    name, subject, calls = "gradcheck", session.subject, 0
    if not session.gradients:
        return Line(name, "skip", f"no gradients: {session.no_gradients}")
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
            return subject(case, replace(draw(case, session.device), **dict(zip("qkv", x, strict=True))))[0]

        try:
            got = out(*leaves).detach()
        except Exception as error:
            if not calls:
                return Line(name, "skip", f"fp64 is not taken: {short(error)}")
            continue
        (verdict,) = judged(subject, case, inputs, {"out": got})
        if not verdict.passes and verdict.error < 1e-5:
            return Line(name, "skip", f"fp64 is computed in less: out is {verdict.error:.1g} off")
        calls += 1
        try:
            torch.autograd.gradcheck(out, leaves, fast_mode=True)
        except Exception as error:  # of gradcheck, or of the backward pass
            what = f"{short(error)} ({case.words()})"
            lines = calling(subject, case, session.device)
            lines += ["x = [t.requires_grad_() for t in (q, k, v)]", "assert torch.autograd.gradcheck(attend, x)"]
            return failed(name, what, case, "\n".join(lines), calls)
    if not calls:
        return Line(name, "skip", "no time was left")
    return Line(name, "ok", "gradients are the derivatives of out, in fp64", calls)


def compilation(session: Session) -> Line:
    """A compiled call is one graph without breaks, with the same results. Code is generated on a GPU only."""
    case = session.case(65)
    inputs = draw(case, session.device)
    leaves = {f"d{name}": getattr(inputs, name).detach() for name in "qkv"}
    torch._dynamo.reset()
    backend = "inductor" if session.device.type == "cuda" else "aot_eager"
    call = torch.compile(session.subject.prepared(case, inputs), fullgraph=True, backend=backend)
    try:
        compiled = results_of(lambda: call(*leaves.values()), leaves if session.gradients else {}, inputs.do)
    except Exception as error:  # Python may use features that a graph lacks
        return Line("compilation", "note", f"torch.compile(fullgraph=True): {short(error)}", 1)
    worst = worst_of(judged(session.subject, case, inputs, compiled))
    if worst.passes:
        return Line("compilation", "ok", f"one graph, within rounding ({worst.share:.2f})", 1, worst.share)
    what = f"compiled, {worst.name} of {worst.place()} is {worst.error:.3g} off ({case.words()})"
    return failed("compilation", what, case, share=worst.share)


def graph(session: Session) -> Line:
    """A captured call, replayed with other values in the same tensors, gives the results of an ordinary call."""
    name, subject, device = "CUDA graph", session.subject, session.device
    if device.type != "cuda":
        return Line(name, "skip", "needs a CUDA GPU")
    case = session.case(256, dtype=session.dtypes[-1], D=64, H_kv=4)  # in 16 bits, where the implementation takes them
    inputs = draw(case, device)
    other = replace(draw(replace(case, seed=case.seed + 1), device), do=inputs.do)
    leaves = {f"d{name}": getattr(inputs, name).detach().clone() for name in "qkv"}
    call = subject.prepared(case, inputs)

    def both() -> dict[str, Tensor | None]:
        return results_of(lambda: call(*leaves.values()), leaves if session.gradients else {}, inputs.do)

    try:
        expected = results(subject, case, other, session.gradients)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                both()
        torch.cuda.current_stream(device).wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            made = both()
        with torch.no_grad():
            for leaf, x in zip(leaves.values(), (other.q, other.k, other.v), strict=True):
                leaf.copy_(x)
        captured.replay()
        torch.cuda.synchronize(device)
    except Exception as error:
        what = f"cannot be captured: {short(error)}"
        lines = calling(subject, case, device)
        lines += ["attend(q, k, v)", "with torch.cuda.graph(torch.cuda.CUDAGraph()):", "    attend(q, k, v)"]
        return failed(name, what, case, "\n".join(lines))
    if all(same(x, expected[name]) for name, x in made.items()):
        return Line(name, "ok", "bit for bit", 1)
    worst = worst_of(judged(subject, case, other, made))
    if worst.passes:
        return Line(name, "ok", "within rounding, not bit for bit", 1, worst.share)
    what = f"{worst.name} of {worst.place()} is {worst.error:.3g} off ({case.words()})"
    return failed(name, what, case, share=worst.share)


def large(session: Session) -> Line:
    """A call on tensors of more than 2^31 elements, of which the first, a middle and the last sequence are judged."""
    name, subject, device = "more than 2^31 elements", session.subject, session.device
    case = session.case(1024, dtype=session.dtypes[-1], B=1025, H=16, H_kv=16, D=128)
    dtype, shape = DTYPES[case.dtype], (case.B, case.H, case.T, case.D)
    needed = LARGE_TENSORS * math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < needed:
        return Line(name, "skip", f"needs a CUDA GPU with {needed >> 30} GiB of free memory")
    generator = torch.Generator(device).manual_seed(case.seed)
    inputs = Inputs(*(torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(4)))
    try:
        got = results(subject, case, inputs, session.gradients)
        for b in (0, case.B // 2, case.B - 1):
            one = Inputs(*(x[b : b + 1] for x in (inputs.q, inputs.k, inputs.v, inputs.do)))
            of_one = {name: x if x is None else x[b : b + 1] for name, x in got.items()}
            worst = worst_of(judged(subject, replace(case, B=1), one, of_one))
            if not worst.passes:
                what = f"{worst.name} of sequence {b} is {worst.error:.3g} off ({case.words()})"
                return failed(name, what, case, share=worst.share)
    except Refused as error:
        return Line(name, "skip", f"refused: {error}")
    finally:
        torch.cuda.empty_cache()  # other processes of the check need it
    return Line(name, "ok", "the first, a middle and the last sequence are right", 1)


CHECKS = {
    "gradcheck": derivatives,
    "compilation": compilation,
    "CUDA graph": graph,
    "more than 2^31 elements": large,
}
