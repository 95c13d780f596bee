"""The time of the attention alone, without the model around it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch

from attention import Attention, AttentionShape
from recipe.run.attention_memory import forward_backward

SECONDS = 0.3  # to measure each score
FEWEST = 3  # passes


def attention_ms(
    attend: Attention, shape: AttentionShape, B: int, T: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Milliseconds that the attention of all layers takes, forward and backward, over B sequences of T tokens: for each
    layer's score the median of some passes after the first."""
    return 1e3 * sum(
        n * seconds_of(forward_backward(attend, shape, score, B, T), shape.device, clock)
        for score, n in Counter(shape.scores).items()
    )


def seconds_of(run: Callable[[], None], device: torch.device, clock: Callable[[], float]) -> float:
    """The median time of a layer's pass."""

    def timed() -> float:
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - start

    timed()  # allocates, compiles, and waits for the device's earlier work
    passes: list[float] = []
    while len(passes) < FEWEST or sum(passes) < SECONDS:
        passes.append(timed())
    return statistics.median(passes)
