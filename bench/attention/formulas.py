"""The time of score formulas on a GPU beside causal attention's, and that of torch's compiled FlexAttention.

    python -m bench.attention.formulas                           8 heads, 16k tokens, bf16; mostly compiling
    python -m bench.attention.formulas --scores FoX --no-flex    the scores whose names contain this
    python -m bench.attention.formulas --heads 128 --dropout 0   one head size, without dropout

Each formula is timed in turns with causal attention of the same head size and dropout: a ratio is the median over pairs
of calls, one directly after the other; the first two compile. Flex has no dropout and is timed at the first of the head
sizes. Each row replaces the earlier one in
bench/results/formulas-<device>.json, and their table is beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import AttentionConfig, DropoutKey, Score, build_attention
from attention.scores.alibi import alibi_slopes
from bench import record
from bench.machine import device_name, require_gpu
from bench.markdown import table
from bench.measure import paired, release
from bench.record import Recorder, command_line, command_of, measurement, read, result_file, write_table

H = 8
FOX = "s + c[h, i] - c[h, j]"
CASES = ((128, 0.0), (128, 0.1), (64, 0.0))  # head size and dropout
# Half-lives of heads of a trained FoX model, every sixth of 48 when sorted: see docs/notes/kernels.md.
TRAINED = (0.75, 1.25, 2.6, 0.37, 0.05, 4.5, 0.23, 1340.0)
WAYS = ("forward", "backward")
IDENTITY = ("score", "implementation", "head_size", "dropout")
KEY = DropoutKey(seed=1, step=2, layer=3, first_sequence=4)
Pass = Callable[[], object]


class Row(NamedTuple):
    """A line of the table: the formula, its tensors for T tokens, and other options of the score.

    learned  whether the tensors need a gradient
    flex     whether FlexAttention is timed too
    """

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


def gates(half_lives: Tensor, T: int) -> dict[str, Tensor]:
    """Forget gates that leave half of a key's weight after so many tokens, (H,), on average."""
    return {"c": -(math.log(2) / half_lives.view(1, H, 1) * 2 * torch.rand(1, H, T)).cumsum(-1)}


def spread_gates(T: int) -> dict[str, Tensor]:
    """Forget gates with half-lives of 1 to 300 tokens, from head to head."""
    return gates(torch.logspace(0, math.log10(300), H), T)


def trained_gates(T: int) -> dict[str, Tensor]:
    """Forget gates with half-lives as trained: see docs/notes/kernels.md."""
    return gates(torch.tensor(TRAINED), T)


ROWS = (
    Row("causal", None, flex=True),
    Row("`s`, the same kernels", "s"),
    Row("scalable softmax, `s * log(n + 1)`", "s * log(n + 1)", flex=True),
    Row("a learned temperature for each head", "a[h] * s", lambda T: {"a": torch.ones(H)}),
    Row("a soft cap, as an option", None, options={"soft_cap": 50.0}),
    Row("a soft cap, as a formula", "50 * tanh(s / 50)"),
    Row("ALiBi with fixed slopes, as an option", None, options={"alibi": True}),
    Row(
        "ALiBi with fixed slopes, as a formula",
        "s - slope[h] * (i - j)",
        lambda T: {"slope": alibi_slopes(H)},
        learned=False,
        flex=True,
    ),
    Row("ALiBi with learned slopes", "s - slope[h] * (i - j)", lambda T: {"slope": alibi_slopes(H)}, flex=True),
    Row("FoX (Forgetting Transformer), gates that stay open", FOX, open_gates, flex=True),
    Row("FoX, gates as trained", FOX, trained_gates, flex=True),
    Row("FoX, gates that leave half a weight after 1 to 300 tokens", FOX, spread_gates, flex=True),
    Row("FoX, gates of about 0.93", FOX, drawn_gates, flex=True),
    Row(
        "a learned table of 128 distances",
        "s + bias[h, min(i - j, 127)]",
        lambda T: {"bias": torch.randn(H, 128)},
        flex=True,
    ),
    Row("a learned bias for each query and key", "s + pair[h, i, j]", lambda T: {"pair": torch.randn(H, T, T)}),
)


def passes(row: Row, implementation: str, T: int, D: int, dropout: float) -> tuple[Callable[[], Tensor], Callable]:
    """The forward pass of a row, and a backward pass for its output."""
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 1, H, T, D, device="cuda", dtype=torch.bfloat16)
    with torch.device("cuda"):
        tensors = {name: x.requires_grad_(row.learned) for name, x in row.tensors(T).items()}
    leaves = [x.requires_grad_() for x in (q, k, v)] + [x for x in tensors.values() if x.requires_grad]
    options: dict[str, Any] = row.options or {}
    score = Score(formula=row.formula, **options)
    attend = build_attention(AttentionConfig(implementation, dropout=dropout))
    key = KEY if dropout else None

    def forward() -> Tensor:
        return attend(q, k, v, score=score, dropout_key=key, tensors=tensors).out

    return forward, lambda out: torch.autograd.grad(out, leaves, do, retain_graph=True)


def reason(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def measure(
    row: Row, implementation: str, T: int, D: int, dropout: float, seconds: float, device: torch.device
) -> record.Row:
    """For each direction a Ratio to causal attention, or {"failed": reason}."""
    result: record.Row = {}
    base_forward, base_backward = passes(ROWS[0], "flash", T, D, dropout)
    base_out = base_forward()
    forward, backward = passes(row, implementation, T, D, dropout)

    def of_backward() -> tuple[Pass, Pass]:
        out = forward()
        return lambda: base_backward(base_out), lambda: backward(out)

    for direction, calls in (("forward", lambda: (base_forward, forward)), ("backward", of_backward)):
        try:
            found = asdict(paired(*calls(), device, seconds))
            result[direction] = {name: round(x, 5) for name, x in found.items()}
        except Exception as error:  # becomes a part of the result
            result[direction] = {"failed": reason(error)}
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write each row."""
    parser = command_line("bench.attention.formulas", __doc__, "formulas")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", nargs="+", type=int, default=[128, 64], help="head sizes")
    parser.add_argument(
        "--dropout", nargs="+", type=float, default=[0.0, 0.1], help="0.1 is measured at head size 128 only"
    )
    parser.add_argument("--scores", default="", help="those whose names contain this")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention")
    parser.add_argument("--seconds", type=float, default=0.3, help="to spend on each pass of a score")
    args = parser.parse_args(arguments)
    require_gpu(parser)
    device, T, start = torch.device("cuda"), args.tokens, time.time()
    cases = [case for case in CASES if case[0] in args.heads and case[1] in args.dropout]
    flex = [] if args.no_flex else [case for case in cases if not case[1]][:1]
    rows = [row for row in ROWS if args.scores in row.name]
    now = measurement(command_of(parser, arguments), device, tokens=T, heads=H, dtype="bfloat16")
    path = result_file(args.name, device_name(device), args.results)
    with Recorder(path, IDENTITY, now) as recorder:
        for row in rows:
            for implementation, (D, dropout) in [("flash", case) for case in cases] + [("flex", case) for case in flex]:
                if implementation == "flex" and not row.flex:
                    continue
                found = measure(row, implementation, T, D, dropout, args.seconds, device)
                case = {"score": row.name, "implementation": implementation, "head_size": D, "dropout": dropout}
                recorder.add(case | found)
                cells = (found[way].get("failed") or f"{found[way]['ratio']:.3f}" for way in WAYS)
                print(
                    f"{time.time() - start:.0f} s: {', '.join(map(str, case.values()))}: {' / '.join(cells)}",
                    flush=True,
                )
                release(device)
    write_table(path.with_suffix(".md"), ratios(read(path)), path)


def ratios(rows: Sequence[record.Row]) -> str:
    """The time of each score over causal attention's, forward and backward, and FlexAttention's."""
    columns = {
        "head size 128": ("flash", 128, 0.0),
        "with dropout 0.1": ("flash", 128, 0.1),
        "compiled flex, 128": ("flex", 128, 0.0),
        "head size 64": ("flash", 64, 0.0),
    }
    found = {(row["score"], row["implementation"], row["head_size"], row["dropout"]): row for row in rows}
    lines = [
        [score.name, *(ratios_of(found.get((score.name, *column))) for column in columns.values())] for score in ROWS
    ]
    causal = (found.get((ROWS[0].name, *column)) for column in columns.values())
    milliseconds = ["" if row is None else ", ".join(f"{row[way]['ms']:.2f}" for way in WAYS) for row in causal]
    return table(["forward, backward", *columns], [["causal attention, ms", *milliseconds], *lines])


def ratios_of(row: record.Row | None) -> str:
    """The ratios of both passes."""
    if row is None:
        return ""
    return ", ".join("fails" if "failed" in row[way] else f"{row[way]['ratio']:.2f}" for way in WAYS)


if __name__ == "__main__":
    main()
