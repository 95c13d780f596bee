"""The time of score formulas on a CPU, relative to the options that compute the same: naive and tiled.

    python -m bench.attention.formulas_cpu                 8 heads, 1,024 tokens, head size 64, fp32, one thread
    python -m bench.attention.formulas_cpu --tokens 512

An option and its formula are timed in turns. The processor's time counts, so that other programs disturb less. A line
has the median over the rounds of each time, and of the ratio of the two times in one round, with its quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from attention import Attention, AttentionConfig, Score, build_attention
from attention.scores.alibi import alibi_slopes
from bench.markdown import table

H = 8
# The name of a pair, the option, the formula and the formula's tensors.
PAIRS: tuple[tuple[str, Score, Score, dict[str, Tensor]], ...] = (
    ("soft cap", Score(soft_cap=50.0), Score(formula="50 * tanh(s / 50)"), {}),
    ("ALiBi", Score(alibi=True), Score(formula="s - slope[h] * (i - j)"), {"slope": alibi_slopes(H)}),
)


def seconds(attend: Attention, score: Score, tensors: dict[str, Tensor], T: int, D: int) -> tuple[float, float]:
    """The processor's seconds of one forward and one backward pass."""
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 1, H, T, D)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    begin = time.process_time()
    out = attend(*leaves, score=score, tensors=tensors).out
    middle = time.process_time()
    torch.autograd.grad(out, leaves, do)
    return middle - begin, time.process_time() - middle


def compared(runs: Sequence[Callable[[], tuple[float, float]]], rounds: int) -> list[str]:
    """For each pass milliseconds with the option and with the formula, and their ratio."""
    for run in runs:
        run()
    times: list[list[tuple[float, float]]] = []
    for number in range(rounds):
        order = random.Random(number).sample(range(2), 2)
        found = {which: runs[which]() for which in order}
        times.append([found[0], found[1]])
    cells = []
    for direction in range(2):
        theirs, ours = ([pair[which][direction] for pair in times] for which in range(2))
        low, middle, high = statistics.quantiles([y / x for x, y in zip(theirs, ours, strict=True)], n=4)
        cells += [
            f"{1e3 * statistics.median(theirs):.1f} / {1e3 * statistics.median(ours):.1f}",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
        ]
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.formulas_cpu", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = []
    for name, option, formula, tensors in PAIRS:
        for attention in ("naive", "tiled"):
            time_of = partial(seconds, build_attention(AttentionConfig(attention)), T=args.tokens, D=args.head_dim)
            runs = [partial(time_of, option, {}), partial(time_of, formula, tensors)]
            lines.append([name, attention, *compared(runs, args.rounds)])
    header = ["score", "attention", "forward, ms: option / formula", "ratio", "backward, ms", "ratio"]
    print(table(header, lines))


if __name__ == "__main__":
    main()
