"""Find the best block sizes for attention/flash/configs.py on this machine's GPU.

    python -m bench.attention.tune            # head sizes 64 and 128, dropout 0 and 0.1: about six minutes
    python -m bench.attention.tune --head 256 --dropout 0 --passes forward --lengths 2048 --out tune.json
    python -m bench.attention.tune --masks window alibi soft_cap --dropout 0 --lengths 16384        # for HOPPER_SCORES

Every candidate first runs once in a separate process, because the compiler may abort on a configuration that it
rejects. There it is checked against naive attention, including dropout's mask. The survivors are timed one after
another, in bf16, at 16k tokens and hidden size 2048. The fastest are printed, to be copied into the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from attention import AttentionConfig, DropoutKey, build_attention
from attention.dropout import drop_threshold
from attention.flash.backward import Tensors, launch_dkdv, launch_dq
from attention.flash.call import Blocks, KernelCall
from attention.flash.forward import forward
from attention.flash.tiles import rows_like
from attention.score import visible_pairs
from attention.scores.alibi import alibi_slopes
from attention.spec import Inputs, Spec
from bench.attention.__main__ import positive, rate
from bench.attention.peers import VARIANTS
from bench.machine import environment, require_gpu

TOKENS, HIDDEN = 16384, 2048
LIMIT_S = 120.0  # for compiling and checking a candidate
MASKS = ["causal", "full", "window", "alibi", "soft_cap"]
KEY = DropoutKey(seed=1337, step=3, layer=1, first_sequence=0)
# Products of T x T x D in each pass, and the number that the usual count of FLOPs gives it: dq and dk/dv share five.
FLOPS = {"forward": 4.0, "dq": 4.0, "dkdv": 6.0}


class Candidate(NamedTuple):
    """Blocks for one pass of one problem."""

    head_dim: int
    mask: str  # one of MASKS
    dropout: float
    kernel: str  # forward, dq or dkdv
    blocks: Blocks


def candidates(heads: list[int], masks: list[str], rates: list[float], kernels: list[str]) -> Iterator[Candidate]:
    """Tiles whose rows fill the warps' matrix instructions: 64 rows for each four warps.

    Small tiles are tried with a register limit too, to fit one more program on a multiprocessor.
    """
    sizes = (32, 64, 128)
    for head_dim, mask, dropout, kernel in itertools.product(heads, masks, rates, kernels):
        for q, k, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4)):
            rows, columns = (k, q) if kernel == "dkdv" else (q, k)
            fits = rows >= 64 and rows >= 16 * warps and columns * rows <= 2048 * warps
            if fits and (k >= 64 or dropout == 0) and (stages > 1 or kernel != "forward"):
                limits = (None, 96, 168) if (q, k, stages) in ((64, 64, 2), (64, 64, 3)) else (None,)
                for registers in limits:
                    yield Candidate(head_dim, mask, dropout, kernel, Blocks(q, k, warps, stages, registers))


def problem_of(candidate: Candidate) -> tuple[int, str, float, str]:
    """The problem that a candidate solves."""
    return candidate[:4]


class Problem:
    """Inputs of one size, and the three passes on them."""

    def __init__(self, batch: int, n_heads: int, length: int, head_dim: int, mask: str, dropout: float) -> None:
        torch.manual_seed(0)
        shape = (batch, n_heads, length, head_dim)
        self.q, self.k, self.v, self.do = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
        score = VARIANTS[mask]
        slopes = alibi_slopes(n_heads, self.q.device) if score.alibi else None
        spec = Spec(score, scale=head_dim**-0.5, threshold=drop_threshold(dropout))
        self.call = KernelCall(spec, Inputs(KEY.pack(self.q.device) if dropout else None, slopes))
        self.out, self.lse2, self.delta = torch.empty_like(self.q), rows_like(self.q), rows_like(self.q)

    def run(self, kernel: str, blocks: Blocks) -> list[Tensor]:
        """Run one pass; the backward passes need `out`, `lse2` and `delta` of the passes before them."""
        q, k, v = self.q, self.k, self.v
        if kernel == "forward":
            _, self.lse2 = forward(q, k, v, self.out, self.call, blocks)
            return [self.out]
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        tensors = Tensors(q, k, v, self.out, self.do, self.lse2, self.delta, *gradients)
        if kernel == "dq":
            launch_dq(tensors, self.call, blocks)
            return gradients[:1]
        launch_dkdv(tensors, self.call, blocks)
        return gradients[1:]


def error(candidate: Candidate) -> float:
    """Relative error of the candidate's pass against naive attention in fp32, on a problem with a ragged end."""
    length = 1400 if candidate.mask == "window" else 333
    problem = Problem(1, 2, length, candidate.head_dim, candidate.mask, candidate.dropout)
    attend = build_attention(AttentionConfig(name="naive", dropout=candidate.dropout))
    q, k, v = (x.float().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse = attend(q, k, v, score=VARIANTS[candidate.mask], dropout_key=KEY, return_lse=True)
    assert lse is not None
    gradients = torch.autograd.grad(out, (q, k, v), problem.do.float())
    problem.out = out.detach().bfloat16()
    problem.lse2[..., :length] = lse / math.log(2)
    keep_probability = 1 - drop_threshold(candidate.dropout) / 256
    problem.delta[..., :length] = (problem.out.float() * problem.do.float()).sum(-1) * keep_probability
    expected = {"forward": [out], "dq": gradients[:1], "dkdv": gradients[1:]}[candidate.kernel]
    actual = problem.run(candidate.kernel, candidate.blocks)
    return max(((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))


def attempt(candidate: Candidate, reply: Connection) -> None:
    """Compile and check one candidate, in a separate process."""
    try:
        worst = error(candidate)
        reply.send("" if worst < 0.02 else f"wrong: relative error {worst:.2g}")
    except Exception as e:
        reply.send(f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")


def survivors(all_candidates: list[Candidate]) -> tuple[list[Candidate], dict[Candidate, str]]:
    """The candidates that compile, run and are correct, and the reasons why the others are left out."""
    fork = multiprocessing.get_context("fork")  # CUDA is not initialised in this process yet
    waiting = list(reversed(all_candidates))
    running: dict[Any, tuple[Candidate, Any, float]] = {}
    good: list[Candidate] = []
    bad: dict[Candidate, str] = {}
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            candidate = waiting.pop()
            receiver, sender = fork.Pipe(duplex=False)
            process = fork.Process(target=attempt, args=(candidate, sender))
            process.start()
            sender.close()
            running[receiver] = (candidate, process, time.monotonic())
        done = wait(running, timeout=1.0)
        overdue = [r for r, (_, _, start) in running.items() if time.monotonic() - start > LIMIT_S]
        for receiver in {*done, *overdue}:
            candidate, process, _ = running.pop(receiver)
            try:
                reason = receiver.recv() if receiver in done else f"took more than {LIMIT_S:g} s"
            except EOFError:
                reason = "the compiler aborted"
            process.kill()
            process.join()
            if reason:
                bad[candidate] = reason
            else:
                good.append(candidate)
    return good, bad


def measure(good: list[Candidate], lengths: list[int], progress: Callable[[str], None]) -> dict[Candidate, list[float]]:
    """Median milliseconds of each candidate at each length."""
    times: dict[Candidate, list[float]] = {candidate: [] for candidate in good}
    for (head_dim, mask, dropout), group in itertools.groupby(sorted(good, key=problem_of), key=lambda c: c[:3]):
        members = list(group)
        for length in lengths:
            problem = Problem(max(1, TOKENS // length), HIDDEN // head_dim, length, head_dim, mask, dropout)
            any_blocks = {c.kernel: c.blocks for c in members}
            for kernel in ("forward", "dq"):
                problem.run(kernel, any_blocks.get(kernel, Blocks(64, 64, 4, 2)))
            for c in members:
                run = lambda c=c, problem=problem: problem.run(c.kernel, c.blocks)  # noqa: E731
                times[c].append(triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median"))
            progress(
                f"head size {head_dim}, {mask}, dropout {dropout:g}, length {length}: {len(members)} candidates timed"
            )
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and time every candidate, and print the fastest."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", type=positive, nargs="+", default=[64, 128])
    parser.add_argument("--masks", nargs="+", default=MASKS[:1], choices=MASKS)
    parser.add_argument("--dropout", type=rate, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--passes", nargs="+", default=list(FLOPS), choices=list(FLOPS))
    parser.add_argument("--lengths", type=positive, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--top", type=int, default=4, help="how many to print for each problem")
    parser.add_argument("--out", type=Path, help="write every measurement to this JSON file")
    args = parser.parse_args(arguments)
    require_gpu(parser)

    everything = list(candidates(args.head, args.masks, args.dropout, args.passes))
    start = time.monotonic()
    good, bad = survivors(everything)
    print(f"{len(good)} of {len(everything)} candidates compile and are correct ({time.monotonic() - start:.0f} s)")
    if not good:
        reason, count = Counter(bad.values()).most_common(1)[0]
        sys.exit(f"error: no candidate is left; {count} of them: {reason}")
    times = measure(good, args.lengths, lambda line: print(line, flush=True))
    if args.out:
        rows = [{**c._asdict(), "blocks": list(c.blocks), "lengths": args.lengths, "ms": ms} for c, ms in times.items()]
        left_out = [{**c._asdict(), "blocks": list(c.blocks), "reason": reason} for c, reason in bad.items()]
        result = environment(torch.device("cuda")) | {"measured": rows, "left_out": left_out}
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    def tflops(c: Candidate) -> list[float]:
        return [
            FLOPS[c.kernel] * TOKENS / n * HIDDEN * visible_pairs(VARIANTS[c.mask], n) / t / 1e9
            for n, t in zip(args.lengths, times[c], strict=True)
        ]

    for problem, group in itertools.groupby(sorted(good, key=problem_of), key=problem_of):
        ranked = sorted(group, key=lambda c: -math.prod(tflops(c)))
        print(f"head size {problem[0]}, {problem[1]}, dropout {problem[2]:g}, {problem[3]}: TFLOP/s at {args.lengths}")
        for c in ranked[: args.top]:
            print(f"    {tuple(c.blocks)!s:24} {'  '.join(f'{x:5.0f}' for x in tflops(c))}")


if __name__ == "__main__":
    main()
