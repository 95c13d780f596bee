"""Mixers on a GPU: flash-linear-attention's kernels judged by the recurrence, and a layer's time beside the package's.

    python -m bench.mixers                          all, about 20 minutes on an H200, most of them the kernels' tuning
    python -m bench.mixers --mixers gdn --dtypes --tokens 8192 32768    in no dtype: times alone
    gpt-attention check fla-gdn                     the judgement of one alone, in words

Kernels that no layer has tuned before are judged in the first of their configurations. A layer has GPT-2's width, 768
channels and 12 heads, and runs forward and backward in bf16, tuned; the time is the GPU's. `fla` is the same layer
here by mixer=fla, also under torch.compile, `chunked` by mixer=chunked. Rows go to
bench/results/mixers-<device>.json, with two tables beside it.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.autotuner import Autotuner

from bench.machine import require_gpu
from bench.measure import Timing, interleaved
from bench.record import Row, command_line, pivot, read, recording, write_table
from mixers.cases import DTYPES
from mixers.check import RECURRENCES, check, named
from mixers.layers import build_mixer

CHANNELS, HEADS = 768, 12
SECONDS = 0.15  # so few calls that a pause covers their launches: the host takes longer than the GPU
CHUNK, SIZES = 64, (64, 64)
IDENTITY = ("part", "mixer", "dtype", "way", "tokens")
# The package's layer with the same weights: its class, and its options for C channels and H heads.
PACKAGES: dict[str, tuple[str, Any]] = {
    "linear": ("LinearAttention", lambda C, H: {"num_heads": H, "feature_map": "elu"}),
    "retnet": ("MultiScaleRetention", lambda C, H: {"num_heads": H}),
    "gla": ("GatedLinearAttention", lambda C, H: {"num_heads": H}),
    "deltanet": ("DeltaNet", lambda C, H: {"num_heads": H}),
    "gdn": ("GatedDeltaNet", lambda C, H: {"num_heads": H, "head_dim": 3 * C // (4 * H)}),
    "kda": ("KimiDeltaAttention", lambda C, H: {"num_heads": H, "head_dim": C // H}),
    "mamba2": (
        "Mamba2",
        lambda C, H: {"num_heads": 2 * H, "head_dim": C // H, "state_size": 2 * C // H, "backend": "triton"},
    ),
}


def packages_layer(name: str, C: int, H: int) -> nn.Module:
    """The layer of flash-linear-attention for C channels and H heads."""
    kind, options = PACKAGES[name]
    return getattr(import_module("fla.layers"), kind)(hidden_size=C, **options(C, H))


def first_configurations() -> None:
    """From now on kernels that are not tuned yet take the first of their configurations, and not the fastest."""
    Autotuner._bench = lambda *_, **__: [0.0]
    Autotuner.check_disk_cache = lambda self, key, configs, choose: choose()


def judged(name: str, dtype: str) -> Row:
    """The lines of a check of the package's kernels."""
    device = torch.device("cuda")
    lines = [line._asdict() for line in check(named(f"fla-{name}", device), device, [dtype], CHUNK, SIZES)]
    return {"part": "check", "mixer": name, "dtype": dtype, "lines": lines}


def timed(name: str, tokens: int) -> Iterator[Row]:
    """Milliseconds of a layer's forward and backward pass over one sequence."""
    ours, chunked = (build_mixer(name, CHANNELS, HEADS, mixer).cuda() for mixer in ("fla", "chunked"))
    layers: dict[str, Any] = {
        "package": packages_layer(name, CHANNELS, HEADS).cuda(),
        "fla": ours,
        "fla, compiled": torch.compile(ours, dynamic=False),
        "chunked": chunked,
    }
    x = torch.randn(1, tokens, CHANNELS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    prepared = {way: partial(partial, forward_backward, layer, x) for way, layer in layers.items()}
    for way, timing in interleaved(prepared, x.device, SECONDS).items():
        if not isinstance(timing, Timing):
            raise timing
        yield {"part": "layer", "mixer": name, "way": way, "tokens": tokens, **timing._asdict()}


def forward_backward(layer: nn.Module, x: Tensor) -> None:
    """One pass in bf16, as in training."""
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x)[0]
    torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out), allow_unused=True)


def verdict(row: Row) -> str:
    """What the check says about kernels: how many groups of calls are wrong, and the first of them."""
    lines = row["lines"]
    wrong, right = ([line for line in lines if line["status"] == status] for status in ("FAIL", "ok"))
    first = next(iter(wrong or lines))
    words = f"{first['group']}: {first['detail']}"
    if wrong:
        return f"wrong in {len(wrong)} of {len(lines)} groups; {words}"
    return f"right in {len(right)} groups" if right else words


def times(rows: Sequence[Row]) -> str:
    """The time of each layer, and its ratio to the package's."""
    layers = [row for row in rows if row["part"] == "layer"]
    package = {(row["mixer"], row["tokens"]): row["ms"] for row in layers if row["way"] == "package"}
    return pivot(
        layers,
        lambda row: f"`{row['mixer']}`, {row['tokens']:,} tokens",
        lambda row: row["way"],
        lambda row: f"{row['ms']:.2f} ms ({row['ms'] / package[row['mixer'], row['tokens']]:.2f})",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge and time the mixers that were asked for."""
    parser = command_line("bench.mixers", __doc__, "mixers")
    parser.add_argument("--mixers", nargs="+", default=list(RECURRENCES), choices=RECURRENCES)
    parser.add_argument("--tokens", nargs="*", default=[8192], type=int)
    parser.add_argument("--dtypes", nargs="*", default=["bf16", "fp16", "fp32"], choices=DTYPES)
    args = parser.parse_args(arguments)
    require_gpu(parser)
    with recording(args, arguments, IDENTITY, torch.device("cuda"), ("flash-linear-attention",)) as recorder:
        for name, tokens in product(args.mixers, args.tokens):
            recorder.add(*timed(name, tokens))
            print(f"{name}: timed", flush=True)
        first_configurations()
        for name, dtype in product(args.mixers, args.dtypes):
            recorder.add(judged(name, dtype))
            print(f"{name}: judged in {dtype}", flush=True)
    path, rows = recorder.path, read(recorder.path)
    checks = [row for row in rows if row["part"] == "check"]
    words = pivot(checks, lambda row: f"`{row['mixer']}`", lambda row: row["dtype"], verdict, corner="kernels of")
    write_table(path.with_suffix(".md"), words, path)
    write_table(path.with_name(f"{path.stem}-times.md"), times(rows), path)
    print(f"results: {path}")


if __name__ == "__main__":
    main()
