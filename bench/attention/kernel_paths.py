"""The speed of each kernel path of attention=flash: the measurements behind attention.path=auto.

    python -m bench.attention.kernel_paths                           every variant: about eight minutes on an H200
    python -m bench.attention.kernel_paths --variants window alibi --heads 64 --dropout 0 --lengths 4096 16384

Measures the problems of bench.attention. After each problem its result replaces the earlier one in
bench/results/kernel-paths-<device>.json. At the end the tables of docs/kernels.md are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attention import AttentionConfig, KernelPath, build_attention
from bench.attention.__main__ import DROPOUTS, HEAD_SIZES, HIDDEN, QUICK_LENGTHS, TOKENS
from bench.attention.peers import VARIANTS, Problem
from bench.machine import device_name, require_gpu
from bench.measure import interleaved
from bench.record import Recorder, Row, command_line, command_of, measurement, read, result_file
from bench.tables.attention import path_ratios, paths

PATHS = (KernelPath.hopper, KernelPath.plain)
IDENTITY = ("head_size", "variant", "dropout", "length")


def measure(problem: Problem, seconds: float) -> Row:
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

    row: Row = {path.value: {} for path in PATHS}
    for direction, prepare, flops in zip(("forward", "backward"), (forward, backward), problem.flops(), strict=True):
        turns = {path.value: partial(prepare, path) for path in PATHS}
        for name, timing in interleaved(turns, problem.device, seconds).items():
            if isinstance(timing, Exception):
                raise timing
            row[name][direction] = {"ms": round(timing.ms, 4), "tflops": round(flops / timing.ms / 1e9, 1)}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write each problem's row, and print the table."""
    parser = command_line("bench.attention.kernel_paths", __doc__, "kernel-paths")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--heads", nargs="+", type=int, default=HEAD_SIZES, help="head sizes")
    parser.add_argument("--dropout", nargs="+", type=float, default=DROPOUTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=QUICK_LENGTHS)
    parser.add_argument("--seconds", type=float, default=0.2, help="to spend on each path and direction of a problem")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    tokens, hidden = TOKENS["cuda"], HIDDEN["cuda"]
    now = measurement(command_of(parser, arguments), device, tokens=tokens, hidden=hidden, dtype="bfloat16")
    path = result_file(args.name, device_name(device), args.results)
    problems = list(product(args.heads, args.variants, args.dropout, args.lengths))
    with Recorder(path, IDENTITY, now) as recorder:
        for n, (D, variant, p, T) in enumerate(problems, 1):
            print(f"{n}/{len(problems)}: {variant}, head size {D}, dropout {p:g}, {T} tokens", flush=True)
            problem = Problem(max(1, tokens // T), hidden // D, T, D, variant, p, torch.bfloat16, device)
            row = {"head_size": D, "variant": variant, "dropout": p, "length": T}
            recorder.add(row | measure(problem, args.seconds))
    rows = read(path)
    print(paths(rows), path_ratios(rows), sep="\n\n")


if __name__ == "__main__":
    main()
