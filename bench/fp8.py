"""attention.precision=fp8 compared with the same attention in bf16: the time of a forward pass, and errors.

    python -m bench.fp8                      about a minute on an H200
    python -m bench.fp8 --lengths 4096 --heads 128

Tokens of a batch and hidden size as in bench.attention, causal. Times of fp8 include the quantisation: that of k and v,
and the kernel that follows, which quantises q itself, are also timed each by itself. Errors are relative,
||x - x_fp64|| / ||x_fp64||, on standard normal inputs and on inputs with outliers, with every key visible. one_scale is
fp8 with a scale a tensor and without rotation, emulated in plain torch.

Results go to bench/results/fp8-<device>.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from attention import AttentionConfig, ProductPrecision, Score, build_attention
from attention.flash.configs import Options
from attention.flash.hopper.configs import fp8_blocks
from attention.flash.hopper.fp8 import quantise
from attention.flash.hopper.fp8_forward import attend
from bench.fp8_emulation import fp8_attention, outliers
from bench.measure import RESULTS, environment, interleaved, require_gpu, slug, write

LENGTHS, HEAD_SIZES = (1024, 2048, 4096, 8192, 16384), (64, 128)
TOKENS, HIDDEN = 16384, 2048
ERROR_LENGTH, ERROR_HEADS = 4096, 4
FULL = Score(causal=False)

Row = dict[str, Any]


def attention(precision: ProductPrecision) -> Callable[..., Tensor]:
    """out of q, k and v, by attention=flash."""
    attend = build_attention(AttentionConfig("flash", precision=precision))
    return lambda q, k, v, **options: attend(q, k, v, **options).out


def unprepared(call: Callable[[], object]) -> Callable[[], object]:
    """A preparation, as `interleaved` takes it, that prepares nothing."""
    return call


def speed(length: int, head_size: int, device: torch.device, seconds: float) -> Row:
    """Milliseconds of bf16, of fp8 and of its two parts; TFLOP/s, and how many times as fast as bf16."""
    B, H = max(1, TOKENS // length), HIDDEN // head_size
    q, k, v = (
        torch.randn(B, length, H, head_size, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(3)
    )
    calls: dict[str, Callable[[], object]] = {
        precision.value: partial(attention(precision), q, k, v) for precision in ProductPrecision
    }
    blocks, options = fp8_blocks(head_size), Options(causal=True, scale=head_size**-0.5, threshold=0, tf32=False)
    quantised, out = quantise(k, v, blocks), torch.empty_like(q)
    calls["quantisation"] = partial(quantise, k, v, blocks)
    calls["kernel"] = lambda: attend(q, quantised._replace(work=torch.zeros_like(quantised.work)), out, options, blocks)
    timings = interleaved({name: partial(unprepared, call) for name, call in calls.items()}, device, seconds)
    row: Row = {"length": length, "head_size": head_size, "batch": B, "heads": H}
    for name, timing in timings.items():
        if isinstance(timing, Exception):
            raise timing
        row[name] = timing.as_dict()
    for name in ("inputs", "fp8", "kernel"):
        row[name]["tflops"] = 2 * B * H * length**2 * head_size / row[name]["ms"] / 1e9
        row[name]["speedup"] = row["inputs"]["ms"] / row[name]["ms"]
    return row


def errors(head_size: int, device: torch.device) -> list[Row]:
    """The relative errors of bf16, fp8 and fp8 with one scale a tensor, on both kinds of input."""
    rows, shape = [], (1, ERROR_HEADS, ERROR_LENGTH, head_size)
    for inputs in ("normal", "outliers"):
        generator = torch.Generator().manual_seed(0)
        draw = partial(outliers if inputs == "outliers" else torch.randn, *shape, generator=generator)
        q, k, v = (draw().to(device, torch.bfloat16) for _ in range(3))
        expected = (q.double() @ k.double().mT / head_size**0.5).softmax(-1) @ v.double()
        found = {precision.value: attention(precision)(q, k, v, score=FULL) for precision in ProductPrecision}
        found["one_scale"] = fp8_attention(q, k, v, causal=False, one_scale=True)
        error = {name: ((x - expected).norm() / expected.norm()).item() for name, x in found.items()}
        rows.append({"inputs": inputs, "length": ERROR_LENGTH, "head_size": head_size, "error": error})
    return rows


def table(rows: Sequence[Row]) -> Table:
    """The times."""
    names = ("bf16", "fp8", "of that, kernel", "of that, quantisation")
    view = Table("head size", "length", *names, title="causal forward: ms, TFLOP/s, times as fast as bf16")
    for row in rows:
        timings = (row[name] for name in ("inputs", "fp8", "kernel"))
        cells = (f"{x['ms']:.3f}, {x['tflops']:.0f}, {x['speedup']:.2f}" for x in timings)
        view.add_row(str(row["head_size"]), str(row["length"]), *cells, f"{row['quantisation']['ms']:.3f}")
    return view


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fp8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T")
    parser.add_argument("--heads", nargs="+", type=int, default=HEAD_SIZES, metavar="D", help="head sizes")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing for each candidate")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device, console = torch.device("cuda"), Console(width=120)
    with torch.no_grad():
        times = []
        for head_size, length in product(args.heads, args.lengths):
            console.print(f"head size {head_size}, {length} tokens", highlight=False)
            times.append(speed(length, head_size, device, args.seconds))
        found = [row for head_size in args.heads for row in errors(head_size, device)]
    result = environment(device) | {"tokens": TOKENS, "hidden": HIDDEN, "times": times, "errors": found}
    out = args.out or RESULTS / f"fp8-{slug(result['device'])}.json"
    write(out, json.dumps(result, indent=1) + "\n")
    console.print(table(times))
    for row in found:
        cells = ", ".join(f"{name} {error:.2e}" for name, error in row["error"].items())
        console.print(f"head size {row['head_size']}, {row['inputs']} inputs: relative errors {cells}")
    console.print(out)


if __name__ == "__main__":
    main()
