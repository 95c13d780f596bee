"""One problem of the attention benchmark: every candidate's speed, memory and error, or why there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attention import AttentionConfig, UnsupportedAttention, build_attention
from attention.scores.alibi import alibi_slopes
from bench.attention.peers import KEY, Attend, Candidate, Problem
from bench.measure import interleaved, peak_bytes, release, synchronise
from bench.record import Row
from recipe.errors import sentence_of


def measure(problem: Problem, chosen: dict[str, Candidate], seconds: float) -> list[Row]:
    """Measure every candidate on one problem, with `seconds` of timing for each and each pass."""
    inputs, dout = problem.tensors()
    expected = reference(problem, inputs, dout)
    rows: dict[str, Row] = {}
    able: dict[str, Attend] = {}
    for name, candidate in chosen.items():
        rows[name] = {"name": name, "label": candidate.label, "ours": candidate.ours} | describe(problem)
        try:
            attend = candidate.build(problem)
            rows[name]["path"] = candidate.path(problem)
            known = expected if not problem.dropout or candidate.ours else None
            rows[name] |= try_out(attend, inputs, dout, known, problem.device)
            able[name] = attend
        except Exception as error:  # a peer may fail in any way; the others continue
            rows[name] |= failure(error)
        release(problem.device)

    def forward(attend: Attend) -> Callable[[], object]:
        return partial(attend, *inputs)

    def backward(attend: Attend) -> Callable[[], object]:
        return partial(torch.autograd.grad, attend(*inputs), inputs, dout)

    for direction, prepare, flops in zip(("forward", "backward"), (forward, backward), problem.flops(), strict=True):
        turns = {name: partial(prepare, attend) for name, attend in able.items()}
        timings = interleaved(turns, problem.device, seconds)
        for name, timing in timings.items():
            if isinstance(timing, Exception):
                rows[name] |= failure(timing)
                del able[name]
            else:
                rows[name][direction] = timing._asdict() | {"tflops": flops / timing.ms / 1e9}
    return with_ratios(list(rows.values()))


def describe(problem: Problem) -> Row:
    """The fields of a row that name the problem."""
    return {
        "batch": problem.B,
        "heads": problem.H,
        "length": problem.T,
        "head_size": problem.D,
        "variant": problem.variant,
        "dropout": problem.dropout,
    }


def try_out(
    attend: Attend,
    inputs: Sequence[Tensor],
    dout: Tensor,
    expected: list[Tensor] | None,
    device: torch.device,
) -> Row:
    """Run a candidate once for its errors and the time of a first call, and once for its memory."""
    begin = time.perf_counter()
    out = attend(*inputs)
    gradients = torch.autograd.grad(out, inputs, dout)
    synchronise(device)
    row: Row = {"status": "measured", "error": None, "first_call_s": round(time.perf_counter() - begin, 6)}
    if expected is not None:
        heads = [x.detach()[:1, :1].float() for x in (out, *gradients[:3])]
        errors = [((x - e).norm() / e.norm()).item() for x, e in zip(heads, expected, strict=True)]
        row["error"] = dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
    del out, gradients
    release(device)  # garbage that is freed during the step would hide some of its memory
    row["extra_bytes"] = peak_bytes(lambda: torch.autograd.grad(attend(*inputs), inputs, dout), device)
    return row


def reference(problem: Problem, inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor] | None:
    """out, dq, dk, dv of the first head of the first sequence in fp32, by the formula; None if memory does not suffice.

    Heads and sequences are independent, and so are their masks.
    """
    attend = build_attention(AttentionConfig("naive", dropout=problem.dropout))
    try:
        q, k, v = (x.detach()[:1, :1].float().requires_grad_() for x in inputs[:3])
        per_head = {name: x[:1] for name, x in problem.per_head().items()}
        if problem.score.alibi:
            per_head["slopes"] = alibi_slopes(problem.H, problem.device)[:1]
        out = attend(q, k, v, score=problem.score, layout=problem.layout(1), dropout_key=KEY, tensors=per_head).out
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:1, :1].float())]
    except torch.OutOfMemoryError:
        return None
    finally:
        release(problem.device)


def failure(error: Exception) -> Row:
    """Why there is no measurement, as `status` and `message`."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "out of memory", "message": str(error).split(". ")[0]}
    if isinstance(error, UnsupportedAttention):
        return {"status": "refused", "message": sentence_of(error)}
    return {"status": "failed", "message": f"{type(error).__name__}: {error}"[:500]}


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add to each row of a problem its speed relative to the fastest peer, an implementation of another project."""
    for direction in ("forward", "backward"):
        peers = [row[direction]["tflops"] for row in rows if direction in row and not row["ours"]]
        for row in rows:
            if direction in row and peers:
                row[direction]["of_fastest_peer"] = row[direction]["tflops"] / max(peers)
    return rows
