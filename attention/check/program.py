"""A failure as a program of about ten lines, which needs torch and the implementation, and ends in AssertionError."""

import torch

from .cases import PATTERNS, Case, drawn
from .judge import Verdict
from .results import LEAVES, Way
from .subject import Subject


def inaccurate(subject: Subject, case: Case, verdict: Verdict, device: torch.device, way: Way) -> str:
    """The program for a result that is further from fp64 than rounding explains."""
    names = ["q", "k", "v", *(["sinks"] if case.sinks else []), *(["bias"] if case.bias else [])]
    lines = [*preamble(subject, case, device), *in_formula(subject, case, names, verdict.name)]
    forward = verdict.name in ("out", "lse")
    if needed := [name for name in names if name in way.of and not (forward and way.of == LEAVES)]:
        lines += [f"for t in [{', '.join(needed)}]: t.requires_grad_()"]
    call = f"out = {subject.code(case, lse=verdict.name == 'lse')}"
    lines += [f"with {way.within}:", f"    {call}"] if way.within else [call]
    if forward:
        doubles = ", ".join(f"{name}.double()" for name in names)
        lines += [f"got, exact = out, formula({doubles})"]
    else:
        leaf = verdict.name[1:]
        lines += [
            f"y = [t.detach().double().requires_grad_() for t in ({', '.join(names)})]",
            f"got = torch.autograd.grad(out, {leaf}, do.to(out))[0]",
            f"exact = torch.autograd.grad(formula(*y), y[{names.index(leaf)}], do.double())[0]",
        ]
    row = f"(got - exact)[{', '.join(map(str, verdict.row))}]"
    lines += [f"assert (error := {row}.abs().max()) <= {verdict.allowed:.3g}, error"]
    return "\n".join(lines)


def crashing(subject: Subject, case: Case, device: torch.device, gradients: bool) -> str:
    """The program for a call that ends its process."""
    lines = calling(subject, case, device)
    if gradients:
        lines += ["x = [t.requires_grad_() for t in (q, k, v)]", "torch.autograd.grad(attend(*x), x, do)"]
    else:
        lines += ["attend(q, k, v)"]
    return "\n".join([*lines, "torch.cuda.synchronize()"] if device.type == "cuda" else lines)


def calling(
    subject: Subject, case: Case, device: torch.device, result: str = "out", formula: bool = False
) -> list[str]:
    """The lines that define q, k, v, do, seen and `attend`, which calls the implementation as the case does.

    result   "lse": `attend` returns the log-sum-exp
    formula  define `formula` too
    """
    call = subject.code(case, lse=result == "lse")
    lines = [*preamble(subject, case, device), "def attend(q, k, v):", f"    return {call}"]
    return [*lines, *in_formula(subject, case, ["q", "k", "v"])] if formula else lines


def preamble(subject: Subject, case: Case, device: torch.device) -> list[str]:
    """The lines that import, and draw the tensors of the case, and `seen`."""
    here = "" if device.type == "cpu" else f".to({str(device)!r})"
    lines = ["import torch", *subject.import_lines(case), f"torch.manual_seed({case.seed})", *drawn(case, device)]
    offset = case.first_position()
    seen = f"torch.ones({case.T}, {case.S}, dtype=torch.bool)" + (f".tril({offset})" if case.causal else "")
    if case.window is not None:
        seen += f".triu({offset - case.window + 1})"
    seen += here
    if case.documents:
        seen += " & (starts[:, None, None, :] == starts[:, None, :, None])"
    if case.pattern != "all":
        lengths = f"enumerate(({case.B}, {case.H}, {case.T}, {case.S}))"
        lines += [f"b, h, i, j = (torch.arange(n){here}.view(-1, *[1] * (3 - axis)) for axis, n in {lengths})"]
        seen += f" & ({PATTERNS[case.pattern]})"
    return [*lines, f"seen = {seen}"]


def in_formula(subject: Subject, case: Case, names: list[str], result: str = "out") -> list[str]:
    """The lines that define `formula`, a function of tensors with these names: the output or, for result "lse", the
    log-sum-exp. With a reference, it calls that, and where the implementation claims nothing, itself."""
    if (reference := subject.standard()) is not None:
        call = reference.code(case, lse=result == "lse")
        return [*reference.import_lines(case), f"def formula({', '.join(names)}):", f"    return {call}"]
    group = case.H // case.H_kv
    k, v = (f"{x}.repeat_interleave({group}, 1)" if group > 1 else x for x in "kv")
    s = f"{case.actual_scale()!r} * q @ {k}.mT"
    if case.soft_cap is not None:
        s = f"{case.soft_cap!r} * torch.tanh({s} / {case.soft_cap!r})"
    if case.alibi:
        distance = f"torch.arange({case.T})[:, None] + {case.first_position()} - torch.arange({case.S})"
        s += f" - slopes[:, None, None] * ({distance}).to(q)"
    s += " + bias" if case.bias else ""
    lines = [f"def formula({', '.join(names)}):", f"    s = ({s}).masked_fill(~seen, -torch.inf)"]
    if case.sinks:
        lines += ["    s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)"]
    if result == "lse":
        return [*lines, "    return s.logsumexp(-1)"]
    p = f"s.softmax(-1){f'[..., :{case.S}]' if case.sinks else ''}"
    p += ".masked_fill(~seen.any(-1, keepdim=True), 0.0)" if "empty" in case.features() else ""
    return [*lines, f"    return {p} @ {v}"]
