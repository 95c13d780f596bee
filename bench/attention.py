"""Attention against its peers: forward, backward, memory and error over the sequence length.

    python -m bench.attention                        all of it: about ten minutes on an H200
    python -m bench.attention --quick                1k, 4k and 16k tokens, causal: about two minutes
    python -m bench.attention --quick --only flash flash-plain       the kernels of attention.path=plain beside auto's
    python -m bench.attention --masks causal window documents alibi soft_cap sinks --dropout 0
    python -m bench.attention --device cpu           small sizes, on a CPU
    python -m bench.attention --only flash sdpa-cudnn --lengths 4096 --heads 128 --dropout 0.1
    python -m bench.attention --cold --only flash --lengths 4096 --dropout 0     how long a first call compiles
    python -m bench.attention --plot-only bench/results/attention-nvidia-h200.json
    python -m bench.attention --plot-only a.json b.json --out joined.json    one result of several

The length grows; the tokens of a batch and the hidden size stay the same. A sequence longer than the batch is a batch
by itself. A forward pass counts as 4 B H T T D FLOPs, visible keys only, and a backward pass as 2.5 times a forward
pass. Memory is the peak of one forward and backward pass above its inputs, so it includes the output and the gradients.
Errors are relative, ||x - x_fp32|| / ||x_fp32||, for the first head of the first sequence. A row names the kernels that
it got (`path`), and how long the first forward and backward pass took with the compilation that they needed. Running
out of memory is a result, and so is exceeding the time limit.

Results go to bench/results/attention-<device>.json after each problem, with the figures beside it. A new measurement
replaces the earlier one of the same problem, so the work can be split: --masks causal, then --masks full. With --only,
--dtype or other sizes, results go to attention-<device>-selection.json.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from attention import AttentionConfig, UnsupportedAttention, build_attention
from attention.score import alibi_slopes
from bench.attention_results import as_json, comparable, joined, read, when
from bench.attention_views import notes, publish, tables
from bench.measure import (
    RESULTS,
    environment,
    interleaved,
    peak_bytes,
    release,
    require_gpu,
    slug,
    synchronise,
    write,
)
from bench.peers import KEY, PACKAGES, PLAIN, VARIANTS, Attend, Candidate, Problem, candidates
from bench.time_budget import TimeBudget, TooSlow

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (1024, 4096, 16384)
HEAD_SIZES = (64, 128)
DROPOUTS = (0.0, 0.1)
MASKS = ("causal", "full")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The size of the work, which a CPU gets less of.
TOKENS, HIDDEN = {"cuda": 16384, "cpu": 1024}, {"cuda": 2048, "cpu": 256}

Row = dict[str, Any]


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


def measure(problem: Problem, chosen: dict[str, Candidate], seconds: float, budget: TimeBudget) -> list[Row]:
    """Measure every candidate on one problem, with `seconds` of timing for each and each pass."""
    inputs, dout = problem.tensors()
    expected = reference(problem, inputs, dout)
    rows: dict[str, Row] = {}
    able: dict[str, Attend] = {}
    for name, candidate in chosen.items():
        rows[name] = {"name": name, "label": candidate.label, "ours": candidate.ours} | describe(problem)
        try:
            budget.check(rows[name])
            attend = candidate.build(problem)
            rows[name]["path"] = candidate.path(problem)
            known = expected if not problem.dropout or candidate.replays else None
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
                rows[name][direction] = timing.as_dict() | {"tflops": flops / timing.ms / 1e9}
    budget.learn(rows.values())
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
        "dtype": str(problem.dtype).removeprefix("torch."),
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
    release(device)  # garbage that is freed during the step would make its memory look smaller
    begin = time.perf_counter()
    row["extra_bytes"] = peak_bytes(lambda: torch.autograd.grad(attend(*inputs), inputs, dout), device)
    row["step_s"] = round(time.perf_counter() - begin, 6)
    return row


def reference(problem: Problem, inputs: Sequence[Tensor], dout: Tensor) -> list[Tensor] | None:
    """out, dq, dk, dv of the first head of the first sequence in fp32, by the formula; None where they do not fit.

    Heads and sequences are independent, and so are their masks.
    """
    attend = build_attention(AttentionConfig("naive", dropout=problem.dropout))
    try:
        q, k, v = (x.detach()[:1, :1].float().requires_grad_() for x in inputs[:3])
        slopes = alibi_slopes(problem.H, problem.device)[:1] if problem.score.alibi else None
        sinks = inputs[3].detach()[:1] if problem.score.sinks else None
        out = attend(
            q, k, v, score=problem.score, layout=problem.layout(1), slopes=slopes, sinks=sinks, dropout_key=KEY
        ).out  # fmt: skip
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout[:1, :1].float())]
    except torch.OutOfMemoryError:
        return None
    finally:
        release(problem.device)


def failure(error: Exception) -> Row:
    """Why there is no measurement, as `status` and `message`."""
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "out of memory", "message": str(error).split(". ")[0]}
    if isinstance(error, TooSlow):
        return {"status": "too slow", "message": str(error)}
    if isinstance(error, UnsupportedAttention):
        return {"status": "refused", "message": str(error)}
    return {"status": "failed", "message": f"{type(error).__name__}: {error}"[:500]}


def with_ratios(rows: list[Row]) -> list[Row]:
    """Add to each row its speed over that of the fastest peer, of one problem: others' implementations only."""
    for direction in ("forward", "backward"):
        peers = [row[direction]["tflops"] for row in rows if direction in row and not row["ours"]]
        for row in rows:
            if direction in row and peers:
                row[direction]["of_fastest_peer"] = row[direction]["tflops"] / max(peers)
    return rows


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
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the defaults that depend on the device."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(candidates())
    parser.add_argument("--lengths", nargs="+", type=positive, metavar="T", help=f"tokens of a sequence: {LENGTHS}")
    parser.add_argument("--heads", nargs="+", type=positive, metavar="D", help=f"channels of a head: {HEAD_SIZES}")
    parser.add_argument("--dropout", nargs="+", type=rate, metavar="P", help=f"default {DROPOUTS}")
    parser.add_argument(
        "--masks", nargs="+", choices=VARIANTS, metavar="MASK", help=f"default {MASKS}, of {', '.join(VARIANTS)}"
    )
    known = list(dict.fromkeys([*names, *PACKAGES]))
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help=f"lengths {QUICK_LENGTHS} and the causal mask alone")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=positive, help=f"of a batch: {TOKENS}")
    parser.add_argument("--hidden", type=positive, help=f"size, all heads together: {HIDDEN}")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing for each implementation and pass")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds that one step may take")
    parser.add_argument(
        "--cold", action="store_true", help="compile everything again, with an empty cache for this run"
    )
    parser.add_argument("--out", type=Path, help="JSON file; the figures go beside it")
    parser.add_argument(
        "--plot-only", nargs="+", type=Path, metavar="JSON", help="draw earlier results again; several make one"
    )
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not args.plot_only:
        require_gpu(parser, "; --device cpu measures small sizes on this CPU")
    for name in set(args.only or ()) - set(names):
        peer = PACKAGES[name]
        parser.error(f"--only {name}: {peer.label} is not installed here; pip install {peer.package}")
    missing = [str(path) for path in args.plot_only or () if not path.is_file()]
    if missing:
        parser.error(f"--plot-only: there is no file {', '.join(missing)}")
    if args.plot_only and len(args.plot_only) > 1 and args.out is None:
        parser.error("--plot-only with several files needs --out, the file that holds them all")

    selection = args.dtype != "bf16" or any(x is not None for x in (args.only, args.tokens, args.hidden))
    args.lengths = args.lengths or (QUICK_LENGTHS if args.quick else LENGTHS)
    args.heads = args.heads or HEAD_SIZES
    args.dropout = DROPOUTS if args.dropout is None else args.dropout
    args.masks = args.masks or (MASKS[:1] if args.quick else MASKS)
    args.only = args.only or [name for name in names if name != PLAIN]
    args.tokens = args.tokens or TOKENS[args.device]
    args.hidden = args.hidden or HIDDEN[args.device]
    if args.out is None and not args.plot_only:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        args.out = RESULTS / f"attention-{slug(device)}{'-selection' if selection else ''}.json"
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the result with its figures."""
    args = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)  # tables in a file keep their full width
    if args.plot_only:
        path, *others = args.plot_only
        result = read(path)
        rows = result.pop("rows")
        for other in others:
            more = comparable(other, result, rows[0]["dtype"])
            if not more:
                sys.exit(f"error: {other} differs from {path} in device, software, size of the work or dtype.")
            rows = joined([*rows, *more])
        if others:
            path = args.out
            write(path, as_json(result, rows))
        show(console, rows, path)
        return

    if args.cold:
        folder = tempfile.mkdtemp(prefix="bench-attention-")
        atexit.register(shutil.rmtree, folder)
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    everyone = candidates()
    chosen = {name: everyone[name] for name in args.only}
    result = environment(torch.device(args.device), [peer.package for peer in PACKAGES.values()])
    result |= {"tokens": args.tokens, "hidden": args.hidden}
    rows = comparable(args.out, result, str(DTYPES[args.dtype]).removeprefix("torch.")) if args.out.exists() else []
    if args.out.exists() and not rows:
        console.print(f"Replacing results of another device, software, size of the work or dtype: {args.out}")
    budget = TimeBudget(args.limit)
    todo = list(problems(args))
    console.print(f"{result['device']}: {len(todo)} problems, {', '.join(chosen)}")
    begin = time.monotonic()
    with console.status("") as status:
        for n, problem in enumerate(todo):
            line = f"{n + 1}/{len(todo)}: {problem.variant}, head size {problem.D}, "
            line += f"dropout {problem.dropout:g}, {problem.T} tokens"
            line += f", {(time.monotonic() - begin) / n * (len(todo) - n):.0f} s left" if n else ""
            status.update(line)
            if not console.is_terminal:  # which shows no status
                console.print(line, highlight=False)
            same = describe(problem)
            rows = [row for row in rows if row | same != row]
            rows = joined([*rows, *(row | when(result) for row in measure(problem, chosen, args.seconds, budget))])
            write(args.out, as_json(result, rows))
            release(problem.device)
    show(console, rows, args.out)
    console.print(f"{time.monotonic() - begin:.0f} s, {args.out}")


def show(console: Console, rows: Sequence[Row], path: Path) -> None:
    """Print the tables and the reasons for missing cells; draw the figures beside `path`."""
    console.print(*tables(rows), *notes(rows), sep="\n", highlight=False)
    publish(rows, path)


if __name__ == "__main__":
    main()
