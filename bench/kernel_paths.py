"""The kernel paths of attention=flash, each forced: the measurements behind attention.path=auto.

    python -m bench.kernel_paths                                     every variant: about five minutes on an H200
    python -m bench.kernel_paths --variants window alibi --heads 64 --dropout 0 --lengths 4096 16384

The problems are those of bench/attention.py. Results go to bench/results/kernel-paths-<device>.json after each, and
replace earlier ones of the same problem. At the end they are printed as a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import AttentionConfig, KernelPath, build_attention
from bench.attention import DROPOUTS, HEAD_SIZES, HIDDEN, QUICK_LENGTHS, TOKENS
from bench.measure import RESULTS, environment, interleaved, require_gpu, slug, write
from bench.peers import VARIANTS, Problem

PATHS = (KernelPath.hopper, KernelPath.plain)


def measure(problem: Problem, seconds: float) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s of each path, forward and backward: path -> direction -> figures."""
    inputs, dout = problem.tensors()
    layout, key = problem.layout(problem.B), problem.dropout_key

    def call(path: KernelPath) -> Tensor:
        attend = build_attention(AttentionConfig("flash", dropout=problem.dropout, path=path))
        q, k, v, *sinks = inputs
        return attend(
            q, k, v, score=problem.score, layout=layout, sinks=sinks[0] if sinks else None, dropout_key=key
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


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: a line for each head size, variant, dropout and path, forward/backward TFLOP/s for each length."""
    rows = list(rows)
    lengths = sorted({row["length"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        label = f"D {row['head_size']}, {row['variant']}" + (f", dropout {row['dropout']:g}" if row["dropout"] else "")
        for path in PATHS:
            speeds = (row[path.value][direction]["tflops"] for direction in ("forward", "backward"))
            cells.setdefault(f"{label}, {path.value}", {})[row["length"]] = "/".join(f"{x:.0f}" for x in speeds)
    lines = [["", *map(str, lengths)], ["---"] * (len(lengths) + 1)]
    lines += [[label, *(found.get(length, "") for length in lengths)] for label, found in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure, write each problem's row, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel_paths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--heads", nargs="+", type=int, default=HEAD_SIZES, help="head sizes")
    parser.add_argument("--dropout", nargs="+", type=float, default=DROPOUTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=QUICK_LENGTHS)
    parser.add_argument("--out", type=Path, help="instead of bench/results/kernel-paths-<device>.json")
    parser.add_argument("--seconds", type=float, default=0.2, help="to spend on each path and direction of a problem")
    args = parser.parse_args()
    require_gpu(parser)
    device = torch.device("cuda")
    now = environment(device)
    out = args.out or RESULTS / f"kernel-paths-{slug(now['device'])}.json"
    rows = {identity(row): row for row in json.loads(out.read_text())["rows"]} if out.exists() else {}
    head = json.dumps(now | {"tokens": TOKENS["cuda"], "hidden": HIDDEN["cuda"], "dtype": "bfloat16"}, indent=1)[:-2]
    problems = list(product(args.heads, args.variants, args.dropout, args.lengths))
    for n, (D, variant, p, T) in enumerate(problems, 1):
        print(f"{n}/{len(problems)}: {variant}, head size {D}, dropout {p:g}, {T} tokens", flush=True)
        problem = Problem(max(1, TOKENS["cuda"] // T), HIDDEN["cuda"] // D, T, D, variant, p, torch.bfloat16, device)
        row = {"head_size": D, "variant": variant, "dropout": p, "length": T, **measure(problem, args.seconds)}
        rows[identity(row)] = row | {"commit": now["git"]["commit"], "date": now["date"]}
        lines = ",\n  ".join(json.dumps(row) for row in rows.values())
        write(out, f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    print(table(rows.values()))


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """The problem that a row measures."""
    return tuple(row[name] for name in ("head_size", "variant", "dropout", "length"))


if __name__ == "__main__":
    main()
