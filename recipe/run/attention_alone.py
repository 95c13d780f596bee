"""The time and the memory of the attention alone, without the model around it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from attention import Attention, AttentionShape, DropoutKey, Layout, Score, documents
from attention.check.memory import AllocationMeter

SECONDS = 0.3  # to measure each score
FEWEST = 3  # passes


def forward_backward(attend: Attention, shape: AttentionShape, score: Score, B: int, T: int) -> Callable[[], None]:
    """A function that runs `attend` forward and backward once over the same B random sequences of T tokens.

    Dropout is as `attend` was configured. Leaves the generators alone.
    """
    generator = torch.Generator(shape.device).manual_seed(0)

    def random(heads: int) -> Tensor:
        x = torch.randn(B, heads, T, shape.head_dim, generator=generator, device=shape.device)
        return x.to(shape.dtype).requires_grad_()

    q, k, v = random(shape.n_heads), random(shape.n_kv_heads), random(shape.n_kv_heads)
    do = torch.ones_like(q)
    learned = [tensor.name for tensor in score.head_tensors if tensor.learned]
    tensors = {name: torch.zeros(shape.n_heads, device=shape.device, requires_grad=True) for name in learned}
    starts = torch.zeros(B, T, dtype=torch.int32, device=shape.device)
    layout = documents(starts) if shape.documents else Layout()
    key = DropoutKey(seed=0, step=0, layer=0, first_sequence=0)

    def run() -> None:
        with torch.random.fork_rng(devices=[]):
            out = attend(q, k, v, score=score, layout=layout, dropout_key=key, tensors=tensors).out
            torch.autograd.grad(out, (q, k, v), do)

    return run


def attention_peak(attend: Attention, shape: AttentionShape, B: int, T: int) -> int:
    """Bytes that a forward and backward pass of `attend` over B sequences of T tokens takes at its peak, above q, k, v
    and the output's gradient: saved tensors, workspace, output and gradients.

    The score is the first layer's.
    """
    run, meter = forward_backward(attend, shape, shape.scores[0], B, T), AllocationMeter()
    with meter:
        run()
    return meter.peak


def attention_ms(
    attend: Attention, shape: AttentionShape, B: int, T: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Milliseconds that the attention of all layers takes, forward and backward, over B sequences of T tokens: for each
    layer's score the median of some passes after the first."""
    total = 0.0
    for score, layers in Counter(shape.scores).items():
        run, passes = forward_backward(attend, shape, score, B, T), list[float]()
        run()  # allocates, compiles, and waits for the device's earlier work
        while len(passes) < FEWEST or sum(passes) < SECONDS:
            _wait(shape.device)
            start = clock()
            run()
            _wait(shape.device)
            passes.append(clock() - start)
        total += layers * statistics.median(passes)
    return 1e3 * total


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
