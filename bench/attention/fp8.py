"""attention.precision=fp8 compared with the same attention in bf16: the time of a forward pass, and errors.

    python -m bench.attention.fp8                      about a minute on an H200
    python -m bench.attention.fp8 --lengths 4096 --heads 128

Causal, with the tokens of a batch and the hidden size of bench.attention. Times of fp8 include the quantisation. The
quantisation of k and v, and the attention kernel, which quantises q, are also timed separately. Errors are relative,
||x - x_fp64|| / ||x_fp64||, with every key visible, on standard normal inputs and on inputs with outliers (one number
in a thousand is ten times as large, as in FlashAttention-3, section 4.3).

Results go to bench/results/fp8-<device>.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from attention import AttentionConfig, ProductPrecision, Score, build_attention
from attention.flash.call import KernelCall
from attention.flash.hopper.configs import fp8_blocks
from attention.flash.hopper.fp8 import quantise
from attention.flash.hopper.fp8_forward import attend
from attention.spec import Inputs, Spec
from bench.machine import device_name, require_gpu
from bench.measure import in_turns
from bench.record import Recorder, Row, command_line, command_of, measurement, read, result_file
from bench.tables.attention import fp8 as table

LENGTHS, HEAD_SIZES = (1024, 2048, 4096, 8192, 16384), (64, 128)
TOKENS, HIDDEN = 16384, 2048
ERROR_LENGTH, ERROR_HEADS = 4096, 4
FULL = Score(causal=False)
NAMES = {ProductPrecision.inputs: "bf16", ProductPrecision.fp8: "fp8"}
KERNEL, QUANTISATION = "fp8, the kernel alone", "quantisation"
IDENTITY = ("name", "head_size", "length", "inputs")


def attention(precision: ProductPrecision) -> Callable[..., Tensor]:
    """A function from q, k and v to the output of attention=flash."""
    attend = build_attention(AttentionConfig("flash", precision=precision))
    return lambda q, k, v, **options: attend(q, k, v, **options).out


def outliers(*shape: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, and one in a thousand ten times as large."""
    x, large = (torch.randn(*shape, generator=generator) for _ in range(2))
    return x + 10 * large * (torch.rand(*shape, generator=generator) < 1e-3)


def speed(length: int, head_size: int, device: torch.device, seconds: float) -> list[Row]:
    """Milliseconds and TFLOP/s of bf16, of fp8 and of its attention kernel, and milliseconds of its quantisation."""
    B, H = max(1, TOKENS // length), HIDDEN // head_size
    q, k, v = (
        torch.randn(B, length, H, head_size, dtype=torch.bfloat16, device=device).transpose(1, 2) for _ in range(3)
    )
    calls: dict[str, Callable[[], object]] = {
        name: partial(attention(precision), q, k, v) for precision, name in NAMES.items()
    }
    blocks, computed = fp8_blocks(head_size), KernelCall(Spec(Score(), scale=head_size**-0.5), Inputs())
    quantised, out = quantise(k, v, blocks), torch.empty_like(q)
    calls[QUANTISATION] = partial(quantise, k, v, blocks)
    zero = torch.zeros_like(quantised.work)
    calls[KERNEL] = lambda: attend(q, quantised._replace(work=zero.clone()), out, computed, blocks)
    rows = []
    for name, timing in in_turns(calls, device, seconds).items():
        if isinstance(timing, Exception):
            raise timing
        row = {"name": name, "head_size": head_size, "length": length} | timing.as_dict()
        flops = {} if name == QUANTISATION else {"tflops": 2 * B * H * length**2 * head_size / timing.ms / 1e9}
        rows.append(row | flops)
    return rows


def errors(head_size: int, device: torch.device) -> list[Row]:
    """The relative errors of bf16 and fp8 on both kinds of input."""
    rows, shape = [], (1, ERROR_HEADS, ERROR_LENGTH, head_size)
    for inputs in ("normal", "outliers"):
        generator = torch.Generator().manual_seed(0)
        draw = partial(outliers if inputs == "outliers" else torch.randn, *shape, generator=generator)
        q, k, v = (draw().to(device, torch.bfloat16) for _ in range(3))
        expected = (q.double() @ k.double().mT / head_size**0.5).softmax(-1) @ v.double()
        for precision, name in NAMES.items():
            out = attention(precision)(q, k, v, score=FULL)
            error = ((out - expected).norm() / expected.norm()).item()
            rows.append(
                {"name": name, "head_size": head_size, "length": ERROR_LENGTH, "inputs": inputs, "error": error}
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the result and print it."""
    parser = command_line("bench.attention.fp8", __doc__, "fp8")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T")
    parser.add_argument("--heads", nargs="+", type=int, default=HEAD_SIZES, metavar="D", help="head sizes")
    parser.add_argument("--seconds", type=float, default=0.1, help="of timing for each candidate")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    now = measurement(command_of(parser, arguments), device, tokens=TOKENS, hidden=HIDDEN)
    path = result_file(args.name, device_name(device), args.results)
    with Recorder(path, IDENTITY, now) as recorder, torch.no_grad():
        for head_size, length in product(args.heads, args.lengths):
            print(f"head size {head_size}, {length} tokens", flush=True)
            recorder.add(*speed(length, head_size, device, args.seconds))
        for head_size in args.heads:
            recorder.add(*errors(head_size, device))
    print(table(read(path)))
    print(path)


if __name__ == "__main__":
    main()
