"""Attention against its peers: forward, backward, memory and error over the sequence length.

    python -m bench.attention                        everything: about 22 minutes on an H200
    python -m bench.attention --masks causal --lengths 1024 4096 16384        about four minutes
    python -m bench.attention --only flash flash-plain       the kernels of attention.path=plain beside auto's
    python -m bench.attention --masks causal alibi alibi_formula fox --only flash flex --dropout 0      formulas
    python -m bench.attention --device cpu --lengths 128 512 --heads 16       small sizes in fp32, on a CPU

In bf16. The length grows; the tokens of a batch and the hidden size stay the same. A sequence longer than the batch is
a batch by itself. A forward pass counts as 4 B H T T D FLOPs, visible keys only, and a backward pass as 2.5 times as
many. Memory is the peak of one forward and backward pass above its inputs, so it includes the output and the gradients.
Errors are relative, ||x - x_fp32|| / ||x_fp32||, for the first head of the first sequence. A row names the kernels that
ran (`path`). Running out of memory is a result.

Rows go to bench/results/attention-<device>.json after each problem, and tables beside it at the end. A new measurement
replaces the earlier one of the same problem, so the work can be split: --masks causal, then --masks full. With --only,
results go to attention-selection-<device>.json, or to the file of --name.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attention import AttentionConfig, UnsupportedAttention, build_attention
from attention.scores.alibi import alibi_slopes
from bench.attention.peers import KEY, PACKAGES, PLAIN, VARIANTS, Attend, Candidate, Problem, candidates
from bench.machine import device_name, require_gpu
from bench.measure import Call, interleaved, peak_bytes, release
from bench.record import Recorder, Row, Text, command_line, pivot, read, recording, result_file, write_table
from recipe.errors import sentence_of
from recipe.wording import short_length


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
            rows[name] |= try_out(attend, inputs, dout, expected if not problem.dropout or candidate.ours else None)
            able[name] = attend
        except Exception as error:  # a peer may fail in any way; the others continue
            rows[name] |= failure(error)
        release(problem.device)

    def forward(attend: Attend) -> Call:
        return partial(attend, *inputs)

    def backward(attend: Attend) -> Call:
        return partial(torch.autograd.grad, attend(*inputs), inputs, dout)

    for direction, prepare, flops in zip(PASSES, (forward, backward), problem.flops(), strict=True):
        turns = {name: partial(prepare, attend) for name, attend in able.items()}
        for name, timing in interleaved(turns, problem.device, seconds).items():
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


def try_out(attend: Attend, inputs: Sequence[Tensor], dout: Tensor, expected: list[Tensor] | None) -> Row:
    """Run a candidate once for its errors, and once for its memory."""
    out = attend(*inputs)
    gradients = torch.autograd.grad(out, inputs, dout)
    row: Row = {"status": "measured", "error": None}
    if expected is not None:
        heads = [x.detach()[:1, :1].float() for x in (out, *gradients[:3])]
        errors = [((x - e).norm() / e.norm()).item() for x, e in zip(heads, expected, strict=True)]
        row["error"] = dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
    del out, gradients
    release(dout.device)  # garbage that is freed during the step would hide some of its memory
    row["extra_bytes"] = peak_bytes(lambda: torch.autograd.grad(attend(*inputs), inputs, dout), dout.device)
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
    for direction in PASSES:
        peers = [row[direction]["tflops"] for row in rows if direction in row and not row["ours"]]
        for row in rows:
            if direction in row and peers:
                row[direction]["of_fastest_peer"] = row[direction]["tflops"] / max(peers)
    return rows


LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
HEAD_SIZES = (64, 128)
DROPOUTS = (0.0, 0.1)
MASKS = ("causal", "full")
PASSES = ("forward", "backward")
SECONDS = 0.1  # of timing for each implementation and pass
# The size of the work: tokens of a batch, channels of all heads together, and the dtype.
SIZES = {"cuda": (16384, 2048, torch.bfloat16), "cpu": (64, 16, torch.float32)}
IDENTITY = ("head_size", "variant", "dropout", "length", "name")


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Every requested combination, each series from short to long."""
    tokens, hidden, dtype = SIZES[args.device]
    for head_size, dropout, variant, length in product(args.heads, args.dropout, args.masks, sorted(args.lengths)):
        B, H = max(1, tokens // length), max(1, hidden // head_size)
        yield Problem(B, H, length, head_size, variant, dropout, dtype, torch.device(args.device))


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with the candidates of this machine."""
    parser = command_line("bench.attention", __doc__, "attention")
    parser.add_argument(
        "--lengths", nargs="+", default=LENGTHS, type=positive, metavar="T", help="tokens of a sequence"
    )
    parser.add_argument("--heads", nargs="+", default=HEAD_SIZES, type=positive, metavar="D", help="channels of a head")
    parser.add_argument("--dropout", nargs="+", default=DROPOUTS, type=rate, metavar="P")
    parser.add_argument("--masks", nargs="+", default=MASKS, choices=VARIANTS, help="masks and scores")
    names = list(candidates())
    known = list(dict.fromkeys([*names, *PACKAGES]))
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument("--device", default="cuda", choices=SIZES)
    args = parser.parse_args(arguments)
    if args.device == "cuda":
        require_gpu(parser, "; --device cpu measures small sizes on this CPU")
    for name in set(args.only or ()) - set(names):
        peer = PACKAGES[name]
        parser.error(f"--only {name}: {peer.label} is not installed here; pip install {peer.package}")
    if args.only and args.name == "attention":
        args.name = "attention-selection"
    args.only = args.only or [name for name in names if name != PLAIN]
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the result and print its tables."""
    args = parse(arguments)
    device = torch.device(args.device)
    tokens, hidden, dtype = SIZES[args.device]
    sizes = {"tokens": tokens, "hidden": hidden, "dtype": str(dtype).removeprefix("torch.")}
    packages = [peer.package for peer in PACKAGES.values()]
    with recording(args, arguments, IDENTITY, device, packages, **sizes) as recorder:
        if recorder.dropped:
            print(f"{recorder.path} has results of other software or sizes, which this measurement replaces.")
        measure_all(args, recorder)
    path = recorder.path
    rows = read(path)
    for ending, table in tables(rows).items():
        write_table(result_file(args.name + ending, device_name(device), args.results).with_suffix(".md"), table, path)
        print(table, "", sep="\n")
    print(*reasons(rows), f"results: {path}", sep="\n")


def measure_all(args: argparse.Namespace, recorder: Recorder) -> None:
    """Measure every problem, with a line of progress for each."""
    everyone, todo = candidates(), list(problems(args))
    chosen = {name: everyone[name] for name in args.only}
    for n, problem in enumerate(todo, 1):
        described = ", ".join(f"{name} {value}" for name, value in describe(problem).items())
        print(f"{n}/{len(todo)}: {described}", flush=True)
        recorder.add(*measure(problem, chosen, SECONDS))
        release(problem.device)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The end of a result's name -> its table: flash beside the fastest peer, and each one's speed."""
    ordered = sorted(rows, key=lambda row: (row["head_size"], row["variant"], row["dropout"], row["length"]))
    columns = [short_length(length) for length in sorted({row["length"] for row in rows})]
    flash = [row for row in ordered if row["name"] == "flash"]

    def table(rows: Sequence[Row], line: Text, cell: Text) -> str:
        return pivot(rows, line, lambda row: short_length(row["length"]), cell, corner="TFLOP/s", columns=columns)

    return {
        "": table(flash, series, beside_fastest),
        "-peers": table(ordered, lambda row: f"{series(row)}, {row['label']}", speed),
    }


def series(row: Row) -> str:
    """The head size, mask and dropout of a row: head size 64, full, dropout 0.1."""
    mask = [] if row["variant"] == "causal" else [row["variant"]]
    dropout = [f"dropout {row['dropout']:g}"] if row["dropout"] else []
    return ", ".join([f"head size {row['head_size']}", *mask, *dropout])


def speed(row: Row) -> str:
    """TFLOP/s of both passes: two digits, or all before the point; or the reason why there are none."""
    if row["status"] != "measured":
        return str(row["status"])
    values = (row[direction]["tflops"] for direction in PASSES)
    return "/".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)


def beside_fastest(row: Row) -> str:
    """The speed, and its ratio to that of the fastest peer of the same measurement."""
    if "of_fastest_peer" not in row.get("backward", {}):
        return speed(row)
    ratios = "/".join(f"{row[direction]['of_fastest_peer']:.2f}" for direction in PASSES)
    return f"{speed(row)} ({ratios})"


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Each reason for cells without a measurement once."""
    for label, message in dict.fromkeys((row["label"], row["message"]) for row in rows if "message" in row):
        yield f"{label}: {message}"


if __name__ == "__main__":
    main()
