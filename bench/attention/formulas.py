"""What scores by formula cost on a GPU, over causal attention without one, and beside torch's compiled Flex.

    python -m bench.attention.formulas                head size 128, 8 heads, 16k tokens, bf16
    python -m bench.attention.formulas --quick        without Flex and dropout

A process for each formula compiles it first, all at the same time; then one after the other is timed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention import AttentionConfig, DropoutKey, Score, build_attention
from attention.scores.alibi import alibi_slopes
from bench.markdown import table

H = 8
KEY = DropoutKey(seed=1, step=2, layer=3, first_sequence=4)


class Row(NamedTuple):
    """A line of the table: the formula, its learned tensors for T tokens, and other options of the score."""

    name: str
    formula: str | None
    tensors: Callable[[int], dict[str, Tensor]] = lambda T: {}
    options: dict[str, object] | None = None
    learned: bool = True
    flex: bool = False


def gates(T: int) -> dict[str, Tensor]:
    return {"c": torch.nn.functional.logsigmoid(3 + torch.randn(1, H, T)).cumsum(-1)}


ROWS = (
    Row("causal", None),
    Row('"s"', "s"),
    Row("soft cap, option", None, options={"soft_cap": 50.0}),
    Row("soft cap, formula", "50 * tanh(s / 50)"),
    Row("ALiBi, option", None, options={"alibi": True}),
    Row("ALiBi, formula", "s - slope[h] * (i - j)", lambda T: {"slope": alibi_slopes(H)}, learned=False, flex=True),
    Row("scalable softmax", "s * log(n + 1)", flex=True),
    Row("temperature a head", "a[h] * s", lambda T: {"a": torch.ones(H)}),
    Row("FoX, all gradients", "s + c[h, i] - c[h, j]", gates, flex=True),
    Row("bias of 128 distances", "s + bias[h, min(i - j, 127)]", lambda T: {"bias": torch.randn(H, 128)}, flex=True),
    Row("bias of T x T", "s + pair[h, i, j]", lambda T: {"pair": torch.randn(H, T, T)}),
)


def passes(row: Row, implementation: str, T: int, D: int, dropout: float) -> tuple[Callable[[], Tensor], Callable]:
    """What runs a row's forward, and its backward for what that returns."""
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 1, H, T, D, device="cuda", dtype=torch.bfloat16)
    with torch.device("cuda"):
        tensors = {name: x.requires_grad_(row.learned) for name, x in row.tensors(T).items()}
    leaves = [x.requires_grad_() for x in (q, k, v)] + [x for x in tensors.values() if x.requires_grad]
    score = Score(formula=row.formula, **(row.options or {}))
    attend = build_attention(AttentionConfig(implementation, dropout=dropout))
    key = KEY if dropout else None

    def forward() -> Tensor:
        return attend(q, k, v, score=score, dropout_key=key, tensors=tensors).out

    return forward, lambda out: torch.autograd.grad(out, leaves, do, retain_graph=True)


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[2:])[repeats // 2]


def warm(number: int, T: int, D: int, dropouts: Sequence[float]) -> None:
    """Compile the kernels of a row into Triton's cache."""
    for dropout in dropouts:
        forward, backward = passes(ROWS[number], "flash", T, D, dropout)
        backward(forward())


def warm_all(T: int, D: int, dropouts: Sequence[float]) -> None:
    """`warm` all rows, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=warm, args=(number, T, D, dropouts)) for number in range(len(ROWS))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def measured(row: Row, implementation: str, T: int, D: int, dropout: float) -> tuple[float, float] | str:
    """Milliseconds forward and backward, or why there are none."""
    try:
        forward, backward = passes(row, implementation, T, D, dropout)
        out = forward()
        return milliseconds(forward), milliseconds(lambda: backward(out))
    except Exception as error:  # a line of the table, not the end of it
        return str(error).splitlines()[0][:60]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.formulas", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "bench.attention.formulas times kernels on a CUDA GPU, and this machine has none.\n")
    T, D, start = args.tokens, args.head_dim, time.time()
    dropouts = (0.0,) if args.quick else (0.0, 0.1)
    warm_all(T, D, dropouts)
    lines: list[list[str]] = []
    base: dict[float, tuple[float, float]] = {}
    for row in ROWS:
        cells = [row.name]
        for dropout in dropouts:
            found = measured(row, "flash", T, D, dropout)
            if isinstance(found, str):
                cells += [found, "", ""]
                continue
            base.setdefault(dropout, found)
            forward, backward = (x / y for x, y in zip(found, base[dropout], strict=True))
            cells += [f"{found[0]:.2f} / {found[1]:.2f}", f"{forward:.2f}", f"{backward:.2f}"]
        if not args.quick:
            other = measured(row, "flex", T, D, 0.0) if row.flex else ""
            cells.append(other if isinstance(other, str) else f"{other[0]:.2f} / {other[1]:.2f}")
        lines.append(cells)
        print(" | ".join(cells), f"({time.time() - start:.0f} s)", flush=True)
    columns = [c for p in dropouts for c in (f"ms, dropout {p}", "forward over causal", "backward over causal")]
    print(table(["score", *columns, *([] if args.quick else ["flex, ms"])], lines))


if __name__ == "__main__":
    main()
