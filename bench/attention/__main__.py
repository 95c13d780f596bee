"""Attention against its peers: forward, backward, memory and error over the sequence length.

    python -m bench.attention                        everything: about 22 minutes on an H200
    python -m bench.attention --quick                1k, 4k and 16k tokens, causal: about four minutes
    python -m bench.attention --quick --only flash flash-plain       the kernels of attention.path=plain beside auto's
    python -m bench.attention --masks causal window documents alibi soft_cap sinks --dropout 0
    python -m bench.attention --device cpu           small sizes, on a CPU
    python -m bench.attention --only flash sdpa-cudnn --lengths 4096 --heads 128 --dropout 0.1

The length grows; the tokens of a batch and the hidden size stay the same. A sequence longer than the batch is a batch
by itself. A forward pass counts as 4 B H T T D FLOPs, visible keys only, and a backward pass as 2.5 times as many.
Memory is the peak of one forward and backward pass above its inputs, so it includes the output and the gradients.
Errors are relative, ||x - x_fp32|| / ||x_fp32||, for the first head of the first sequence. A row names the kernels that
ran (`path`) and gives the time of the first forward and backward pass, compilation included. Running out of memory is
a result.

Rows go to bench/results/attention-<device>.json after each problem, and tables beside it at the end. A new measurement
replaces the earlier one of the same problem, so the work can be split: --masks causal, then --masks full. With --only,
--dtype or other sizes, results go to attention-selection-<device>.json, or to the file of --name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from rich.console import Console

from attention import AttentionConfig, build_attention
from bench.attention.cells import describe, measure
from bench.attention.peers import PACKAGES, PATHS, VARIANTS, Problem, candidates
from bench.attention.views import reasons, tables
from bench.machine import device_name, require_gpu
from bench.measure import release
from bench.record import Recorder, command_line, command_of, measurement, read, result_file, write_table
from recipe.errors import sentence_of

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (1024, 4096, 16384)
HEAD_SIZES = (64, 128)
DROPOUTS = (0.0, 0.1)
MASKS = ("causal", "full")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The size of the work; smaller on a CPU.
TOKENS, HIDDEN = {"cuda": 16384, "cpu": 1024}, {"cuda": 2048, "cpu": 256}
IDENTITY = ("head_size", "variant", "dropout", "length", "name")


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Every requested combination, each series from short to long."""
    for head_size, dropout, variant, length in product(args.heads, args.dropout, args.masks, sorted(args.lengths)):
        yield Problem(
            B=max(1, args.tokens // length),
            H=max(1, args.hidden // head_size),
            T=length,
            D=head_size,
            variant=variant,
            dropout=dropout,
            dtype=DTYPES[args.dtype],
            device=torch.device(args.device),
        )


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def rate(text: str) -> float:
    """A dropout rate that the mask supports."""
    try:
        return build_attention(AttentionConfig(dropout=float(text))).dropout
    except ValueError as error:
        raise argparse.ArgumentTypeError(sentence_of(error)) from None


def argument_parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    parser = command_line("bench.attention", __doc__, "attention")
    parser.add_argument("--lengths", nargs="+", type=positive, metavar="T", help=f"tokens of a sequence: {LENGTHS}")
    parser.add_argument("--heads", nargs="+", type=positive, metavar="D", help=f"channels of a head: {HEAD_SIZES}")
    parser.add_argument("--dropout", nargs="+", type=rate, metavar="P", help=f"default {DROPOUTS}")
    parser.add_argument(
        "--masks", nargs="+", choices=VARIANTS, metavar="MASK", help=f"default {MASKS}, of {', '.join(VARIANTS)}"
    )
    known = list(dict.fromkeys([*candidates(), *PACKAGES]))
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help=f"lengths {QUICK_LENGTHS} and the causal mask alone")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=positive, help=f"of a batch: {TOKENS}")
    parser.add_argument("--hidden", type=positive, help=f"size, all heads together: {HIDDEN}")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing for each implementation and pass")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the defaults that depend on the device."""
    parser = argument_parser()
    args = parser.parse_args(arguments)
    args.command = command_of(parser, arguments)
    if args.device == "cuda":
        require_gpu(parser, "; --device cpu measures small sizes on this CPU")
    names = list(candidates())
    for name in set(args.only or ()) - set(names):
        peer = PACKAGES[name]
        parser.error(f"--only {name}: {peer.label} is not installed here; pip install {peer.package}")
    selection = args.dtype != "bf16" or any(x is not None for x in (args.only, args.tokens, args.hidden))
    if selection and args.name == "attention":
        args.name = "attention-selection"
    args.lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    args.heads = args.heads or HEAD_SIZES
    args.dropout = DROPOUTS if args.dropout is None else args.dropout
    args.masks = args.masks or (MASKS[:1] if args.quick else MASKS)
    args.only = args.only or [name for name in names if name not in PATHS]
    args.tokens = args.tokens or TOKENS[args.device]
    args.hidden = args.hidden or HIDDEN[args.device]
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the result and print its tables."""
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)  # tables in a file keep their full width
    device = torch.device(args.device)
    sizes = {"tokens": args.tokens, "hidden": args.hidden, "dtype": str(DTYPES[args.dtype]).removeprefix("torch.")}
    now = measurement(args.command, device, [peer.package for peer in PACKAGES.values()], **sizes)
    path = result_file(args.name, device_name(device), args.results)
    begin = time.monotonic()
    with Recorder(path, IDENTITY, now) as recorder:
        if recorder.dropped:
            console.print(f"{path} has results of other software or sizes, which this measurement replaces.")
        measure_all(args, recorder, console)
    rows = read(path)
    for ending, table in tables(rows).items():
        write_table(result_file(args.name + ending, device_name(device), args.results).with_suffix(".md"), table, path)
        console.print(table, "", sep="\n", highlight=False)
    console.print(*reasons(rows), sep="\n", highlight=False)
    console.print(f"{time.monotonic() - begin:.0f} s, {path}")


def measure_all(args: argparse.Namespace, recorder: Recorder, console: Console) -> None:
    """Measure every problem, with a line of progress for each."""
    everyone, todo = candidates(), list(problems(args))
    chosen = {name: everyone[name] for name in args.only}
    console.print(f"{recorder.measurement['device']}: {len(todo)} problems, {', '.join(chosen)}")
    begin = time.monotonic()
    with console.status("") as status:
        for n, problem in enumerate(todo):
            line = f"{n + 1}/{len(todo)}: {problem.variant}, head size {problem.D}, "
            line += f"dropout {problem.dropout:g}, {problem.T} tokens"
            line += f", {(time.monotonic() - begin) / n * (len(todo) - n):.0f} s left" if n else ""
            status.update(line)
            if not console.is_terminal:  # which shows no status
                console.print(line, highlight=False)
            recorder.replace(describe(problem), measure(problem, chosen, args.seconds))
            release(problem.device)


if __name__ == "__main__":
    main()
