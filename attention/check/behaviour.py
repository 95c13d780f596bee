"""Properties that rounding does not affect: hidden keys have no influence, repeated calls give the same bits, etc."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .accuracy import smallest_failure
from .cases import DTYPES, Case, draw, problem
from .formula import evaluate
from .judge import computing_with
from .program import calling
from .results import Refused, Way, results, verdicts
from .run import Failure, Line, Session
from .shrink import smallest

SECTION = "behaviour"
REPEATS = 24
Keys = tuple[str, str, Tensor]  # the keys to change: in words, as the code of an index, and as (B, H_kv, S) bool


def line(session: Session, name: str, calls: int, wrong: list[Failure], fine: str) -> Line:
    """The report's line on a property: its failures, or where there are none, the sentence `fine`."""
    late = session.out_of_time()
    if not calls:
        return Line(name, "skip", "no time was left" if late else "every call was refused")
    detail = wrong[0].what if wrong else fine + ("; no time for all cases" if late else "")
    return Line(name, "FAIL" if wrong else "ok", detail, calls, None, wrong[:1])


def leaks(session: Session) -> Line:
    """Keys that a query must not see change nothing of its row, and receive no gradient from it."""
    subject, calls, wrong = session.subject, 0, list[Failure]()
    cases = [
        Case(T=130, S=130, B=2, H=4, H_kv=session.kv_heads(4)),
        Case(T=40, S=130, B=2),
        Case(T=130, S=130, window=33),
        Case(T=129, S=129, documents=(63, 1, 65)),
        Case(T=129, S=129, documents=(64, 65), causal=False),
        Case(T=65, S=65, B=2, H=4, H_kv=session.kv_heads(4), causal=False),
    ]
    pairs = [
        (session.fitting(replace(case, dtype=dtype, seed=session.seed)), keys)
        for dtype in session.dtypes
        for case in cases
        if subject.supports(case)
        for keys in key_sets(session.fitting(case))
    ]
    random.Random(session.seed).shuffle(pairs)  # so that a short check tries some of each case
    for case, (words, code, changed) in session.timely(pairs):
        try:
            result = leak(session, case, changed)
        except Refused:
            continue
        calls += 2
        if result and not wrong:
            small = smallest(case, lambda case: leaking(session, case) is not None)
            if shown := leaking(session, small):
                case, (words, code, result) = small, shown
            what = f"{result} changed with {words}, which its rows must not see ({case.words()})"
            wrong.append(Failure(what, case, leak_program(session, case, code, result)))
    return line(session, "hidden keys", calls, wrong, "hidden keys, sequences and heads change nothing, bit for bit")


def leaking(session: Session, case: Case) -> tuple[str, str, str] | None:
    """The first keys that are hidden and change a result: in words, as the code of an index, and the result's name."""
    try:
        found = ((words, code, leak(session, case, changed)) for words, code, changed in key_sets(case))
        return next((one for one in found if one[-1]), None)
    except Refused:
        return None


def key_sets(case: Case) -> Iterator[Keys]:
    """The keys that a check changes."""
    j = torch.arange(case.S)
    for first in (1, 16, 33, 63, 64, 65, 100, 128):
        if first < case.S:
            yield f"keys from {first} on", f":, :, {first}:", (j >= first).expand(case.B, case.H_kv, -1)
    for stop in (1, 32, 64, 95):
        yield f"keys before {stop}", f":, :, :{stop}", (j < stop).expand(case.B, case.H_kv, -1)
    none = torch.zeros(case.B, case.H_kv, case.S, dtype=torch.bool)
    if case.B > 1:
        yield "keys of sequence 0", "0", none.index_fill(0, torch.tensor(0), True)
    if case.H_kv > 1:
        yield "keys of head 0", ":, 0", none.index_fill(1, torch.tensor(0), True)


def leak(session: Session, case: Case, changed: Tensor) -> str:
    """The name of the first result that depends on hidden keys; empty where none does."""
    inputs = draw(case, session.device)
    changed = changed.to(session.device)
    seen = problem(case, inputs).seen.expand(case.B, case.H, -1, -1)
    sees = (seen & changed.repeat_interleave(case.H // case.H_kv, dim=1).unsqueeze(2)).any(dim=-1)  # (B, H, T)
    if sees.all():
        return ""
    do = inputs.do.masked_fill(sees.unsqueeze(-1), 0.0)
    factor = hiding(session)
    k, v = (torch.where(changed.unsqueeze(-1), factor * x, x) for x in (inputs.k, inputs.v))
    before = results(session.subject, case, replace(inputs, do=do), session.gradients)
    after = results(session.subject, case, replace(inputs, do=do, k=k, v=v), session.gradients)
    for name, rows in (("out", ~sees), ("lse", ~sees), ("dq", ~sees), ("dk", ~changed), ("dv", ~changed)):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            continue
        if not torch.equal(a[rows], b[rows]):
            return name
        if name in ("dk", "dv") and not (b[changed] == 0).all():
            return name
    return ""


def hiding(session: Session) -> int:
    """The factor of hidden keys. Other attention than softmax attention may overflow where they are large."""
    return -100 if session.subject.standard() is None else -1


def leak_program(session: Session, case: Case, keys: str, result: str) -> str:
    """The program that shows that a result changes with hidden keys."""
    group = case.H // case.H_kv
    lines = [
        *calling(session.subject, case, session.device, result),
        "changed = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)",
        f"changed[{keys}] = True",
        f"other = [torch.where(changed[..., None], {hiding(session)} * x, x) for x in (k, v)]",
        f"rows = ~(seen & changed{f'.repeat_interleave({group}, 1)' if group > 1 else ''}[:, :, None]).any(-1)",
    ]
    if result in ("out", "lse"):
        lines += ["assert torch.equal(attend(q, k, v)[rows], attend(q, *other)[rows])"]
    else:
        lines += [
            "def gradient(k, v):",
            "    x = [t.detach().requires_grad_() for t in (q, k, v)]",
            f"    return torch.autograd.grad(attend(*x), x, do * rows[..., None])[{('dq', 'dk', 'dv').index(result)}]",
        ]
        if result == "dq":
            lines += ["assert torch.equal(gradient(k, v)[rows], gradient(*other)[rows])"]
        else:
            lines += [
                "assert (gradient(*other)[changed] == 0).all(), 'hidden keys have a gradient'",
                "assert torch.equal(gradient(k, v)[~changed], gradient(*other)[~changed])",
            ]
    return "\n".join(lines)


def not_finite(session: Session) -> Line:
    """NaN and infinity reach the rows that see them, and no row for which the formula gives finite values.

    Rows that do not see the key are not judged: the formula multiplies its value by a weight of zero, which gives NaN,
    and an implementation may skip the key.
    """
    subject, calls, wrong = session.subject, 0, list[Failure]()
    case, left_out = session.case(70, B=1), [name for name in session.dtypes if spreads(DTYPES[name], session.device)]
    for value, name in product((torch.nan, torch.inf, -torch.inf), ("q", "k", "v")):
        for dtype in session.timely(name for name in session.dtypes if name not in left_out):
            here = replace(case, dtype=dtype)
            inputs = draw(here, session.device)
            x = getattr(inputs, name).clone()
            x[0, 0, 33, 2] = value
            bad = replace(inputs, **{name: x})
            doubles = bad.q.double(), bad.k.double(), bad.v.double(), bad.do.double()
            asked = problem(here, bad)
            exact, sees = evaluate(*doubles, asked).results, asked.seen[..., 33].unsqueeze(-1)
            try:
                got = results(subject, here, bad, session.gradients)
            except Refused:
                continue
            calls += 1
            for result, y in got.items():
                if y is None or wrong:
                    continue
                right = exact[result].isfinite()
                spread = (right & ~y.isfinite()).any().item()
                lost = result == "out" and bool((~right & sees & y.isfinite()).any())
                if spread or lost:
                    verb = "does not reach" if lost else "spreads into"
                    where = "rows that see it" if lost else "where the formula is finite"
                    what = f"{value} in {name}[0, 0, 33, 2] {verb} {result} {where} ({here.words()})"
                    code = not_finite_program(session, here, name, value, lost) if result == "out" else ""
                    wrong.append(Failure(what, here, code))
    fine = "reach the same results as in the formula"
    if left_out:
        fine += f"; not judged in {', '.join(left_out)}: this processor's own product spreads a NaN to other rows"
    return line(session, "NaN and infinity", calls, wrong, fine)


@cache
def spreads(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's own product of two matrices spreads a NaN to other rows, as that of bf16 does with AMX."""
    x, y = torch.ones(33, 70, dtype=dtype, device=device), torch.ones(70, 16, dtype=dtype, device=device)
    x[9, 2] = torch.nan
    return int((x @ y).isnan().any(dim=-1).sum()) > 1


def not_finite_program(session: Session, case: Case, name: str, value: float, lost: bool) -> str:
    """The program that puts a value into q, k or v, which then is lost or spreads too far."""
    shown = "assert got.isfinite()[exact.isfinite()].all()"
    if lost:
        shown = "assert not got.isfinite()[~exact.isfinite() & seen[:, 33, None]].any()"
    return "\n".join(
        [
            *calling(session.subject, case, session.device, formula=True),
            f"{name}[0, 0, 33, 2] = float('{value}')",
            "got, exact = attend(q, k, v), formula(q.double(), k.double(), v.double())",
            shown,
        ]
    )


def repeats(session: Session) -> Line:
    """Repeated calls give the same bits."""
    subject, calls, wrong, fewest = session.subject, 0, list[Failure](), REPEATS
    for dtype in session.timely(session.dtypes):
        case = session.case(65, dtype=dtype)
        inputs = draw(case, session.device)
        try:
            with computing_with(session.threads):
                first = results(subject, case, inputs, session.gradients)
                others = [results(subject, case, inputs, session.gradients) for _ in session.timely(range(REPEATS))]
        except Refused:
            continue
        if not others:
            break
        calls, fewest = calls + len(others), min(fewest, len(others))
        for n, other in enumerate(others):
            differs = [name for name, x in first.items() if not same(x, other[name])]
            if differs:
                what = f"call {n + 2} of the same inputs gives another {', '.join(differs)} ({case.words()})"
                wrong.append(Failure(what, case, repeat_program(session, case, differs)))
                break
    return line(session, "the same again", calls, wrong, f"{fewest} repetitions are equal, bit for bit")


def repeat_program(session: Session, case: Case, differs: list[str]) -> str:
    """The program that repeats a call until its results differ."""
    lines = calling(session.subject, case, session.device)
    if "out" in differs:
        lines += [f"outs = [attend(q, k, v) for _ in range({2 * REPEATS})]"]
    else:
        lines += [
            "x = [t.requires_grad_() for t in (q, k, v)]",
            "gradients = lambda: torch.cat([g.flatten() for g in torch.autograd.grad(attend(*x), x, do)])",
            f"outs = [gradients() for _ in range({2 * REPEATS})]",
        ]
    return "\n".join([*lines, "assert all(torch.equal(out, outs[0]) for out in outs)"])


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two results have the same bits; NaN equals NaN, and 0 is not -0."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


def in_ways(
    session: Session, name: str, ways: Iterable[Way], fine: str, sizes: Sequence[tuple[int, int]], *dtypes: str
) -> Line:
    """The line on calls that are made in other ways than usual, whose results have to be right."""
    calls, wrong = 0, list[Failure]()
    for dtype, (T, S), way in session.timely(product(dtypes or session.dtypes, sizes, ways)):
        case = session.case(T, S, dtype)
        try:
            found = verdicts(session.subject, case, session.device, session.gradients, way)
        except Refused:
            continue
        calls += 1
        if not wrong:
            wrong += [smallest_failure(session, case, verdict, way) for verdict in found if not verdict.passes][:1]
    return line(session, name, calls, wrong, fine)


def evaluation(session: Session) -> Line:
    """A call without gradients is as right as one with gradients."""
    ways = [Way(f" under torch.{mode}()", f"torch.{mode}()", of=()) for mode in ("no_grad", "inference_mode")]
    return in_ways(session, "without gradients", ways, "right without gradients too", ((65, 65), (1, 130), (128, 128)))


def some_gradients(session: Session) -> Line:
    """Where only some of q, k and v need a gradient, it is what it is where all do."""
    if not session.gradients:
        return Line("some gradients", "skip", f"no gradients: {session.no_gradients}")
    sets = (("q",), ("k",), ("v",), ("k", "v"))
    ways = [Way(f" where only {' and '.join(of)} needs a gradient", of=of) for of in sets]
    return in_ways(session, "some gradients", ways, "q, k and v may need gradients one by one", ((65, 65),))


def autocast(session: Session) -> Line:
    """In a block of torch.autocast, results of fp32 tensors are right to the rounding of bf16 at least."""
    eps, within = torch.finfo(torch.bfloat16).eps, f"torch.autocast({session.device.type!r}, torch.bfloat16)"
    fine = "right under torch.autocast, to the rounding of bf16"
    if "fp32" not in session.dtypes:
        return line(session, "autocast", 0, [], fine)
    way = Way(" under torch.autocast", within, eps=eps)
    return in_ways(session, "autocast", [way], fine, ((33, 33), (65, 65), (128, 128)), "fp32")


def side_effects(session: Session) -> Line:
    """A call changes neither its inputs, nor the state of torch's generator, nor the results of an earlier call."""
    subject, calls, wrong = session.subject, 0, list[Failure]()
    for dtype in session.timely(session.dtypes):
        case = session.case(65, dtype=dtype)
        inputs, state = draw(case, session.device), generators(session.device)
        copies = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "do")}
        others = draw(replace(case, seed=session.seed + 1), session.device)
        overwritten = set()
        try:
            for gradients in {session.gradients, False}:
                got = results(subject, case, inputs, gradients)
                kept = {name: x.clone() for name, x in got.items() if x is not None}
                results(subject, case, others, gradients)
                overwritten |= {name for name, x in kept.items() if not survives(x, got[name])}
                calls += 2
        except Refused:
            continue
        for name in sorted(overwritten):
            wrong.append(Failure(f"a call overwrites {name} of the call before ({case.words()})", case))
        for name, copy in copies.items():
            if not torch.equal(getattr(inputs, name), copy):
                wrong.append(Failure(f"a call changes its {name} in place ({case.words()})", case))
        if not all(map(torch.equal, generators(session.device), state)):
            wrong.append(Failure("a call without dropout draws from torch's generator", case))
    return line(session, "side effects", calls, wrong, "inputs, earlier results and random numbers stay as they are")


def generators(device: torch.device) -> list[Tensor]:
    """The states of torch's generators: the CPU's, and that of a GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def survives(copy: Tensor, result: Tensor | None) -> bool:
    """Whether a result is still as its copy."""
    try:
        return same(copy, result)
    except RuntimeError:  # torch refuses to read what the replay of a CUDA graph has overwritten
        return False


CHECKS = {
    "hidden keys": leaks,
    "NaN and infinity": not_finite,
    "the same again": repeats,
    "without gradients": evaluation,
    "some gradients": some_gradients,
    "autocast": autocast,
    "side effects": side_effects,
}
