"""The kernel paths of attention=flash beside each other, each forced: what attention.path=auto is decided by.

    python -m bench.kernel_paths                                     every variant: about five minutes on an H200
    python -m bench.kernel_paths --variants window alibi --heads 64 --dropout 0 --lengths 4096 16384

The problems are those of bench/attention.py. Results go to bench/results/kernel-paths-<device>.json after each; a new
measurement replaces the earlier one of the same problem.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention import AttentionConfig, KernelPath, build_attention
from bench.attention import DROPOUTS, HEAD_SIZES, HIDDEN, QUICK_LENGTHS, TOKENS
from bench.measure import RESULTS, environment, interleaved, require_gpu, slug, write
from bench.peers import KEY, VARIANTS, Problem

PATHS = (KernelPath.hopper, KernelPath.plain)


def measure(problem: Problem, seconds: float) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s of each path, forward and backward: path -> direction -> figures."""
    inputs, dout = problem.tensors()
    layout = problem.layout(problem.B)

    def call(path: KernelPath) -> Tensor:
        attend = build_attention(AttentionConfig("flash", dropout=problem.dropout, path=path))
        q, k, v, *sinks = inputs
        return attend(
            q, k, v, score=problem.score, layout=layout, sinks=sinks[0] if sinks else None, dropout_key=KEY
        ).out  # fmt: skip

    def forward(path: KernelPath) -> Callable[[], object]:
        return partial(call, path)

    def backward(path: KernelPath) -> Callable[[], object]:
        return partial(torch.autograd.grad, call(path), inputs, dout)

    found: dict[str, Any] = {path.value: {} for path in PATHS}
    for direction, prepare, flops in zip(("forward", "backward"), (forward, backward), problem.flops(), strict=True):
        turns = {path.value: partial(prepare, path) for path in PATHS}
        for name, timing in interleaved(turns, problem.device, seconds).items():
            if isinstance(timing, Exception):
                raise timing
            found[name][direction] = {"ms": round(timing.ms, 4), "tflops": round(flops / timing.ms / 1e9, 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--heads", nargs="+", type=int, default=HEAD_SIZES, help="head sizes")
    parser.add_argument("--dropout", nargs="+", type=float, default=DROPOUTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=QUICK_LENGTHS)
    parser.add_argument("--seconds", type=float, default=0.2, help="to spend on each path and direction of a problem")
    args = parser.parse_args()
    require_gpu(parser)
    device = torch.device("cuda")
    now = environment(device)
    path = RESULTS / f"kernel-paths-{slug(now['device'])}.json"
    rows = {row["problem"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for D, variant, p, T in product(args.heads, args.variants, args.dropout, args.lengths):
        B = max(1, TOKENS["cuda"] // T)
        problem = Problem(B, HIDDEN["cuda"] // D, T, D, variant, p, torch.bfloat16, device)
        name = f"D {D}, {variant}, dropout {p:g}, {T}"
        found = measure(problem, args.seconds)
        rows[name] = {"problem": name, **found, "commit": now["git"]["commit"], "date": now["date"]}
        shown = (f"{n} {x['forward']['tflops']:.0f}/{x['backward']['tflops']:.0f}" for n, x in found.items())
        print(f"{name}: {', '.join(shown)} TFLOP/s", flush=True)
        lines = ",\n  ".join(json.dumps(row) for row in rows.values())
        head = json.dumps(now | {"tokens": TOKENS["cuda"], "hidden": HIDDEN["cuda"]}, indent=1)[:-2]
        write(path, f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
