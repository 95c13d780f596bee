"""Checks that need a GPU: CUDA graphs, and calls on two streams at once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .calls import results_of
from .cases import Case, Inputs, draw
from .program import calling
from .results import Refused, judged, results, short
from .run import Line, Session, failed

SECTION = "on a GPU"
ROUNDS = 20
NEEDED = "needs a CUDA GPU"


def common(session: Session) -> Case:
    """A case of usual sizes in the last of the precisions: 16 bits, where the implementation takes them."""
    return session.case(256, dtype=session.dtypes[-1], D=64, H_kv=4)


def graph(session: Session) -> Line:
    """A captured call, replayed with other values in the same tensors, gives the results of an ordinary call."""
    name, subject, case = "CUDA graph", session.subject, common(session)
    if session.device.type != "cuda":
        return Line(SECTION, name, "skip", NEEDED)
    inputs, other = draw(case, session.device), draw(replace(case, seed=case.seed + 1), session.device)
    leaves = {f"d{name}": getattr(inputs, name).detach().clone() for name in "qkv"}
    call = subject.prepared(case, inputs)

    def both() -> dict[str, Tensor | None]:
        return results_of(lambda: call(*leaves.values()), leaves if session.gradients else {}, inputs.do)

    try:
        expected = results(subject, case, other.changed(do=inputs.do), session.gradients)
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
    return compared(session, name, case, other.changed(do=inputs.do), expected, [made])


def streams(session: Session) -> Line:
    """Calls on two streams at once give the same results as one after the other."""
    subject, case = session.subject, common(session)
    if session.device.type != "cuda":
        return Line(SECTION, "two streams", "skip", NEEDED)
    inputs = [draw(replace(case, seed=case.seed + n), session.device) for n in range(2)]
    try:
        expected = [results(subject, case, x, session.gradients) for x in inputs]
        torch.cuda.synchronize(session.device)
        both = [torch.cuda.Stream(session.device) for _ in range(2)]
        made: list[list[dict[str, Tensor | None]]] = [[], []]
        for _ in range(ROUNDS):
            for n in range(2):
                with torch.cuda.stream(both[n]):
                    made[n].append(results(subject, case, inputs[n], session.gradients))
        torch.cuda.synchronize(session.device)
    except Refused as error:
        return Line(SECTION, "two streams", "skip", f"refused: {error}")
    lines = [compared(session, "two streams", case, inputs[n], expected[n], made[n]) for n in range(2)]
    return max(lines, key=lambda line: line.status == "FAIL")


def compared(
    session: Session,
    name: str,
    case: Case,
    inputs: Inputs,
    expected: dict[str, Tensor | None],
    made: list[dict[str, Tensor | None]],
) -> Line:
    """The report's line on results that must equal an ordinary call's."""
    bitwise = True
    for got in made:
        for key, x in got.items():
            right = expected.get(key)
            if x is not None and right is not None and torch.equal(x, right):
                continue
            bitwise = False
            for verdict in judged(session.subject, case, inputs, {key: x}):
                if verdict.passes:
                    continue
                what = f"{key} of {verdict.place()} is {verdict.error:.3g} off ({case.words()})"
                return failed(SECTION, name, what, case, calls=len(made), share=verdict.share)
    return Line(SECTION, name, "ok", "bit for bit" if bitwise else "within rounding, not bit for bit", len(made))


CHECKS = {"CUDA graph": graph, "two streams": streams}
