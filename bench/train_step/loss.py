"""Ways to compute the loss over GPT-2's vocabulary, forward and backward: time, memory and error.

    python -m bench.train_step.loss                          on a GPU, a minute
    python -m bench.train_step.loss --rows 4096 8192 16384   chunked with other chunks

The plain loss, eager and compiled; ours in chunks; and, where installed, torch's own chunked linear_cross_entropy (2.13
and newer) and Liger-Kernel's. Products are in bf16 under autocast, as in training. The error is that of the weight's
gradient, relative to fp32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.machine import device_name, require_gpu
from bench.measure import peak_bytes
from bench.record import Recorder, Row, command_line, command_of, measurement, result_file
from model.loss import CHUNK_ROWS, LossKind, cross_entropy

N, C, VOCAB, PADDED = 32_768, 768, 50_257, 50_304
SMALL = slice(0, 4096)  # rows for which an fp32 reference fits in memory
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def our_loss(hidden: Tensor, weight: Tensor, targets: Tensor, kind: LossKind, chunk_rows: int = CHUNK_ROWS) -> Tensor:
    """The recipe's loss."""
    return cross_entropy(hidden, weight, targets, VOCAB, kind, chunk_rows)


def torch_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's chunked linear_cross_entropy, on the unpadded vocabulary: it has no way to ignore padding."""
    return F.linear_cross_entropy(
        hidden.bfloat16(), weight[:VOCAB].bfloat16(), targets, options=torch.nn.LinearCrossEntropyOptions()
    )


def liger_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger-Kernel's fused linear cross-entropy, on the unpadded vocabulary: it has no way to ignore padding."""
    functions = importlib.import_module("liger_kernel.transformers.functional")
    return functions.liger_fused_linear_cross_entropy(hidden.bfloat16(), weight[:VOCAB].bfloat16(), targets)


def candidates(rows: Sequence[int]) -> dict[str, Loss]:
    """Name -> loss, for what is installed here."""
    found: dict[str, Loss] = {
        "plain": partial(our_loss, kind=LossKind.plain),
        "plain, compiled": torch.compile(partial(our_loss, kind=LossKind.plain)),
    }
    for count in rows:
        found[f"chunked, {count} rows"] = partial(our_loss, kind=LossKind.chunked, chunk_rows=count)
    if hasattr(F, "linear_cross_entropy"):
        found["torch, chunked"] = torch_loss
    if importlib.util.find_spec("liger_kernel"):
        found["Liger-Kernel"] = liger_loss
    return found


def measure(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor], reference: Tensor) -> Row:
    """Milliseconds of a step, GiB above the inputs, and the error of the weight's gradient on the reference's rows."""
    hidden, weight, targets = inputs

    def step(rows: slice = slice(None)) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(hidden[rows], weight, targets[rows])
        return torch.autograd.grad(value, (hidden, weight))

    gradient = step(SMALL)[1]
    error = ((gradient - reference).norm() / reference.norm()).item()
    del gradient
    torch.cuda.empty_cache()
    memory = peak_bytes(step, hidden.device) or 0
    milliseconds = triton.testing.do_bench(step, warmup=200, rep=1000, return_mode="median")
    return {"ms": milliseconds, "gib": memory / 2**30, "error": error}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write bench/results/loss-<device>.json."""
    parser = command_line("bench.train_step.loss", __doc__, "loss")
    parser.add_argument("--rows", nargs="+", type=int, default=[CHUNK_ROWS])
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device = torch.device("cuda")
    torch.manual_seed(0)
    hidden = torch.randn(N, C, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(PADDED, C, device=device)).requires_grad_()
    targets = torch.randint(VOCAB, (N,), device=device)
    plain = our_loss(hidden[SMALL], weight, targets[SMALL], LossKind.plain)
    reference = torch.autograd.grad(plain, weight)[0]
    print(f"{device_name(device)}, {N} rows, {C} channels, {VOCAB} classes; matrix products alone take")
    print(f"{6 * N * C * PADDED / 790e12 * 1e3:.1f} ms at 790 TFLOP/s")
    path = result_file(args.name, device_name(device), args.results)
    now = measurement(command_of(parser, arguments), device, ["liger-kernel"])
    with Recorder(path, ("name",), now) as recorder:
        for name, loss in candidates(args.rows).items():
            row = {"name": name} | measure(loss, (hidden, weight, targets), reference)
            print(f"{name:<22} {row['ms']:7.2f} ms  {row['gib']:6.2f} GiB  error {row['error']:.1e}", flush=True)
            recorder.add(row)
    print(f"results: {path}")


if __name__ == "__main__":
    main()
