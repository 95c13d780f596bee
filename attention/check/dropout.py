"""Dropout: how many weights it drops, which ones, how it scales the others, and whether the backward drops the same.

Where v has a single 1 in each column, the output is the weights themselves, and shows the mask that the implementation
used. With this mask the formula judges the output and all gradients as it does without dropout.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .calls import weights_shown
from .cases import Case, draw, problem
from .judge import judge, worst_of
from .program import calling
from .results import Refused, judged, results
from .run import Failure, Line, Session, failed

SECTION = "dropout"
RATE = 32 / 256  # which masks with rates in steps of 1/256 have exactly
FINE = 1.4 / 256  # a rate between such steps
DEVIATIONS = 5.5


def dropout(session: Session) -> Iterator[Line]:
    """A line for each property."""
    if "dropout" not in session.subject.features:
        yield Line("dropout", "skip", "not declared")
        return
    # The mask is read in the highest precision, in which no weight rounds to zero.
    dtype = next((name for name in ("fp32", "bf16", "fp16") if name in session.dtypes), "fp32")
    causal = "full" not in session.subject.features
    case = session.case(160 if causal else 96, 160, dtype, causal=causal, dropout=RATE, seed=session.seed + 1)
    try:
        keep, seen = drawn_mask(session, case)
    except Refused as error:
        yield Line("dropout", "skip", f"refused: {error}")
        return
    yield rate(session, case, keep, seen)
    yield independence(session, case, keep, seen)
    yield scheme(session, case, keep, seen)
    yield replay(session)
    yield between_steps(session, replace(case, dropout=FINE))


def drawn_mask(session: Session, case: Case) -> tuple[Tensor, Tensor]:
    """The weights that an implementation keeps, and those that its queries see, (B, H, T, S) bool. Raises Refused."""
    inputs = draw(replace(case, spread=0.1), session.device)

    def attend(v: Tensor) -> Tensor:
        out = results(session.subject, case, replace(inputs, v=v), gradients=False)["out"]
        assert out is not None
        return out

    return weights_shown(attend, inputs.v) != 0, problem(case, inputs).seen.expand(case.B, case.H, -1, -1)


def agreement(a: Tensor, b: Tensor, seen: Tensor) -> float:
    """By how many standard deviations two independent masks agree more or less often than they should."""
    n = seen.sum().item()
    expected = RATE**2 + (1 - RATE) ** 2
    share = ((a == b) & seen).sum().item() / n
    return (share - expected) / (expected * (1 - expected) / n) ** 0.5


def rate(session: Session, case: Case, keep: Tensor, seen: Tensor) -> Line:
    """The share of weights that is dropped."""
    n = int(seen.sum())
    share = (~keep & seen).sum().item() / n
    off = (share - RATE) / (RATE * (1 - RATE) / n) ** 0.5
    detail = f"{share:.4f} of {n:,} weights were dropped, and {RATE} was requested ({off:+.1f} deviations)"
    if abs(off) <= DEVIATIONS:
        return Line("rate", "ok", detail, 1)
    return failed("rate", detail, case)


def independence(session: Session, case: Case, keep: Tensor, seen: Tensor) -> Line:
    """Masks of different heads, sequences, rows, columns and seeds are independent."""
    pairs = {
        "heads 0 and 1": (keep[:, 0], keep[:, 1], seen[:, 0]),
        "heads 0 and 2": (keep[:, 0], keep[:, 2], seen[:, 0]),
        "sequences 0 and 1": (keep[0], keep[1], seen[0]),
    }
    for n in (1, 8, 16, 32, 64):
        pairs[f"queries i and i + {n}"] = (keep[:, :, n:], keep[:, :, :-n], seen[:, :, :-n])
        pairs[f"keys j and j + {n}"] = (keep[..., n:], keep[..., :-n], seen[..., n:])
    other, _ = drawn_mask(session, replace(case, seed=case.seed + 1))
    pairs["two seeds"] = (keep, other, seen)
    off = {name: agreement(*pair) for name, pair in pairs.items()}
    worst = max(off, key=lambda name: abs(off[name]))
    if abs(off[worst]) <= DEVIATIONS:
        return Line("independence", "ok", f"heads, sequences, queries, keys and seeds ({off[worst]:+.1f})", 2)
    what = f"the masks of {worst} are not independent ({off[worst]:+.0f} standard deviations)"
    lines = calling(session.subject, case, session.device)
    code = "\n".join([*lines, *shared_program(case)]) if worst.startswith("heads") else ""
    return failed("independence", what, case, code, 2)


def shared_program(case: Case) -> list[str]:
    """The last lines of a program that compares the masks of two heads."""
    return [
        f"v = torch.eye({case.S}, {case.D}, dtype=v.dtype, device=v.device).expand_as(v)",
        f"torch.manual_seed({case.seed})",
        f"keep = attend(q, k, v)[:, :, {case.D} - {case.S} :] != 0",
        "assert not torch.equal(keep[:, 0], keep[:, 1])",
    ]


def scheme(session: Session, case: Case, keep: Tensor, seen: Tensor) -> Line:
    """The same seed gives the same mask, and an implementation of this library draws the mask of `keep_mask`."""
    again, _ = drawn_mask(session, case)
    if not torch.equal(again, keep):
        return failed("mask", "the same seed gives another mask in the next call", case, calls=2)
    right = session.subject.mask(case, session.device)
    if right is None:
        return Line("mask", "ok", "the same seed gives the same mask", 2)
    if torch.equal(right & seen, keep & seen):
        return Line("mask", "ok", "that of keep_mask, weight by weight", 2)
    b, h, i, j = ((right ^ keep) & seen).nonzero()[0].tolist()
    what = (
        f"sequence {b}, head {h}, query {i}, key {j} is {'kept' if keep[b, h, i, j] else 'dropped'}, unlike keep_mask"
    )
    return failed("mask", what, case, calls=2)


def replay(session: Session) -> Line:
    """The output and the gradients, judged with the mask of the forward pass."""
    subject, calls, wrong, share, name = session.subject, 0, list[Failure](), 0.0, "replay"
    for T, S, D in ((64, 64, 32), (97, 97, 32), (33, 130, 64), (1, 70, 16), (129, 129, 16)):
        for dtype in session.timely(session.dtypes):
            case = session.case(T, S, dtype, D=D, dropout=RATE, seed=session.seed + 2)
            try:
                inputs = draw(case, session.device)
                keep, _ = drawn_mask(session, replace(case, dtype=session.dtypes[0]))
                got = results(subject, case, inputs, session.gradients)
                verdicts = judged(subject, case, inputs, got, keep)
            except Refused:
                continue
            calls += 1
            worst = worst_of(verdicts)
            share = max(share, worst.share)
            if not worst.passes:
                bad = next(v for v in verdicts if not v.passes)
                what = f"{bad.name} of {bad.place()} is {bad.error:.3g} off with the mask that the forward drew"
                unscaled = replace(problem(case, inputs, keep), keep_scale=1.0)
                if all(v.passes for v in judge(inputs.q, inputs.k, inputs.v, inputs.do, unscaled, got)):
                    name, what = "scale", f"kept weights are not scaled by 1 / (1 - p), so {what}"
                wrong.append(Failure(f"{what}, {bad.share:.3g} times what rounding explains ({case.words()})", case))
    if not calls:
        why = "no time was left" if session.out_of_time() else "every call was refused"
        return Line("replay", "skip", why)
    if wrong:
        return Line(name, "FAIL", wrong[0].what, calls, share, [replay_failure(session, wrong[0])])
    detail = f"forward and backward drop the same weights and scale the others (worst {share:.2f})"
    return Line("replay", "ok", detail, calls, share)


def between_steps(session: Session, case: Case) -> Line:
    """A rate that an implementation may round to steps of 1/256, with the scale of the rate that it drops with."""
    name, inputs = "rate between steps", draw(case, session.device)
    try:
        keep, seen = drawn_mask(session, case)
        got = results(session.subject, case, inputs, gradients=False)
    except Refused as error:
        return Line(name, "skip", f"refused: {error}")
    n = int(seen.sum())
    share = (~keep & seen).sum().item() / n
    realised = min((FINE, round(256 * FINE) / 256), key=lambda p: abs(share - p))
    detail = f"{share:.5f} of {n:,} weights were dropped, and {FINE:.5f} was requested"
    if abs(share - realised) > DEVIATIONS * (realised / n) ** 0.5:
        return failed(name, detail, case)
    asked = replace(problem(case, inputs, keep), keep_scale=1 / (1 - realised))
    (verdict,) = judge(inputs.q, inputs.k, inputs.v, inputs.do, asked, {"out": got["out"]})
    if not verdict.passes:
        what = f"{detail}; the others are not scaled by {1 / (1 - realised):.5f}: {verdict.place()} is wrong"
        return failed(name, what, case, share=verdict.share)
    return Line(name, "ok", f"{detail}; the others are scaled for that", 1, verdict.share)


def replay_failure(session: Session, failure: Failure) -> Failure:
    """The failure with a program: the gradient of v is linear in the weights that the forward shows."""
    case = replace(failure.case, T=24, S=24, D=24, B=1, H=1, H_kv=1, dtype=session.dtypes[0])
    lines = calling(session.subject, case, session.device)
    lines[-1:-1] = [] if session.subject.style == "ours" else [f"    torch.manual_seed({case.seed})"]
    lines += [
        "eye, v = torch.eye(24, dtype=v.dtype, device=v.device).expand_as(v), v.requires_grad_()",
        "weights = attend(q, k, eye).detach()  # after dropout",
        "p = (q @ k.mT * 24**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)",
        f"torch.testing.assert_close(weights, p * (weights != 0) / {1 - RATE}, rtol=1e-4, atol=1e-5)",
        "(dv,) = torch.autograd.grad(attend(q, k, v), v, do)",
        "torch.testing.assert_close(dv, weights.mT @ do, rtol=1e-3, atol=1e-4)",
    ]
    return Failure(failure.what, case, "\n".join(lines))
