"""The time of score formulas on a GPU, relative to causal attention, and beside torch's compiled FlexAttention.

    python -m bench.attention.formulas                head size 128, 8 heads, 16k tokens, bf16
    python -m bench.attention.formulas --quick        without Flex and dropout
    python -m bench.attention.formulas --rows FoX     causal attention, and the rows whose names contain this
    python -m bench.attention.formulas --json FILE    also write the times to a file

First each formula compiles in a process of its own, all at the same time. Then all are timed in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attention import AttentionConfig, DropoutKey, Score, build_attention
from attention.scores.alibi import alibi_slopes
from bench.markdown import table
from bench.measure import Timing, in_turns

H = 8
FOX = "s + c[h, i] - c[h, j]"
SECONDS = 0.2  # of the device, for each pass of each row
Result = Timing | Exception
KEY = DropoutKey(seed=1, step=2, layer=3, first_sequence=4)


class Row(NamedTuple):
    """A line of the table: the formula, its learned tensors for T tokens, and other options of the score."""

    name: str
    formula: str | None
    tensors: Callable[[int], dict[str, Tensor]] = lambda T: {}
    options: dict[str, object] | None = None
    learned: bool = True
    flex: bool = False


def open_gates(T: int) -> dict[str, Tensor]:
    """Forget gates that forget nothing."""
    return {"c": torch.zeros(1, H, T)}


def drawn_gates(T: int) -> dict[str, Tensor]:
    """Forget gates of which each forgets about 7 %."""
    return {"c": torch.nn.functional.logsigmoid(3 + torch.randn(1, H, T)).cumsum(-1)}


def spread_gates(T: int) -> dict[str, Tensor]:
    """Forget gates that leave half of a key's weight after 1 to 300 tokens, from head to head."""
    rates = math.log(2) / torch.logspace(0, math.log10(300), H).view(1, H, 1)
    return {"c": -(rates * 2 * torch.rand(1, H, T)).cumsum(-1)}


ROWS = (
    Row("causal", None),
    Row('"s"', "s"),
    Row("soft cap, option", None, options={"soft_cap": 50.0}),
    Row("soft cap, formula", "50 * tanh(s / 50)"),
    Row("ALiBi, option", None, options={"alibi": True}),
    Row("ALiBi, formula", "s - slope[h] * (i - j)", lambda T: {"slope": alibi_slopes(H)}, learned=False, flex=True),
    Row("ALiBi, learned slopes", "s - slope[h] * (i - j)", lambda T: {"slope": alibi_slopes(H)}, flex=True),
    Row("scalable softmax", "s * log(n + 1)", flex=True),
    Row("temperature a head", "a[h] * s", lambda T: {"a": torch.ones(H)}),
    Row("FoX, open gates", FOX, open_gates, flex=True),
    Row("FoX, gates of 0.93", FOX, drawn_gates, flex=True),
    Row("FoX, half-lives 1 to 300", FOX, spread_gates, flex=True),
    Row("bias of 128 distances", "s + bias[h, min(i - j, 127)]", lambda T: {"bias": torch.randn(H, 128)}, flex=True),
    Row("bias of T x T", "s + pair[h, i, j]", lambda T: {"pair": torch.randn(H, T, T)}),
)


def passes(row: Row, implementation: str, T: int, D: int, dropout: float) -> tuple[Callable[[], Tensor], Callable]:
    """The forward pass of a row, and a backward pass for its output."""
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


def warm(number: int, implementation: str, T: int, D: int, dropouts: Sequence[float]) -> None:
    """Compile the kernels of a row into the caches on disk."""
    for dropout in dropouts:
        try:
            forward, backward = passes(ROWS[number], implementation, T, D, dropout)
            backward(forward())
        except Exception as error:  # `measured` meets it again
            print(f"{ROWS[number].name}, {implementation}: {reason(error)}", flush=True)


def warm_all(rows: Sequence[Row], T: int, D: int, dropouts: Sequence[float], flex: bool) -> None:
    """`warm` rows, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    calls: list[tuple[int, str, int, int, Sequence[float]]] = []
    for row in rows:
        calls.append((ROWS.index(row), "flash", T, D, dropouts))
        if row.flex and flex:
            calls.append((ROWS.index(row), "flex", T, D, (0.0,)))
    workers = [context.Process(target=warm, args=call) for call in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def measured(rows: Sequence[Row], implementation: str, T: int, D: int, dropout: float) -> list[tuple[Result, Result]]:
    """Forward and backward of each row, all timed in turns."""
    device = torch.device("cuda")
    calls: tuple[dict[str, Callable[[], object]], ...] = ({}, {})
    failed: tuple[dict[str, Result], ...] = ({}, {})
    for row in rows:
        direction = 0
        try:
            forward, backward = passes(row, implementation, T, D, dropout)
            out = forward()
            calls[0][row.name], direction = forward, 1
            backward(out)
            calls[1][row.name] = partial(backward, out)
        except Exception as error:  # becomes a part of the table
            failed[direction][row.name] = failed[1][row.name] = error
    found = [in_turns(named, device, SECONDS) | others for named, others in zip(calls, failed, strict=True)]
    return [(found[0][row.name], found[1][row.name]) for row in rows]


def reason(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def milliseconds(results: tuple[Result, Result]) -> str:
    """Milliseconds of forward and backward; in the place of one that failed the reason."""
    return " / ".join(reason(x)[:60] if isinstance(x, Exception) else f"{x.ms:.3f}" for x in results)


def ratio(result: Result, base: Result) -> str:
    """How much longer one takes than another; nothing where there is no time."""
    if isinstance(result, Exception) or isinstance(base, Exception):
        return ""
    return f"{result.ms / base.ms:.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention.formulas", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "bench.attention.formulas times kernels on a CUDA GPU, and this machine has none.\n")
    T, D, start = args.tokens, args.head_dim, time.time()
    dropouts = (0.0,) if args.quick else (0.0, 0.1)
    rows = [row for row in ROWS if row is ROWS[0] or args.rows in row.name]
    warm_all(rows, T, D, dropouts, flex=not args.quick)
    print(f"{torch.cuda.get_device_name()}, compiled in {time.time() - start:.0f} s", flush=True)
    lines = [[row.name] for row in rows]
    for dropout in dropouts:
        results = measured(rows, "flash", T, D, dropout)
        for line, times in zip(lines, results, strict=True):
            line += [milliseconds(times), *(ratio(x, base) for x, base in zip(times, results[0], strict=True))]
        print(f"dropout {dropout} timed after {time.time() - start:.0f} s", flush=True)
    if not args.quick:
        flex = [row for row in rows if row.flex]
        others = dict(zip((row.name for row in flex), measured(flex, "flex", T, D, 0.0), strict=True))
        for line in lines:
            line.append(milliseconds(others[line[0]]) if line[0] in others else "")
    columns = [c for p in dropouts for c in (f"ms, dropout {p}", "forward over causal", "backward over causal")]
    header = ["score", *columns, *([] if args.quick else ["flex, ms"])]
    print(table(header, lines))
    if args.json is not None:
        args.json.write_text(json.dumps({"tokens": T, "head_dim": D, "rows": [header, *lines]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
