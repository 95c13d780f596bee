"""The steps of the ladder, measured: their reads, memory and overflow, and the silent error of a missing line."""

import __future__

import inspect
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learn import flash, softmax
from learn.flash import lowest
from learn.memory import Slow, SlowMemory, Traffic
from learn.tracing import record

EXAMPLE = torch.arange(1.0, 7.0)  # scores and values 1 to 6: the output is 5.4329
RESCALING = "# rescale"  # marks the line of softmax.py that rescales old sums to a new maximum
# Rounding of fp32 sums of a few positive terms; a wrong formula is off by orders of magnitude more.
TOLERANCE = 1e-5
PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: the function, its formula, and its new idea."""

    function: Callable[..., None]
    title: str
    formula: str
    idea: str


LADDER = (
    Rung(softmax.native, "Native softmax", "y = exp(x) / Σ exp(x)", "The formula as it is written."),
    Rung(
        softmax.safe,
        "Safe softmax",
        "y = exp(x − m) / Σ exp(x − m),  m = max x",
        "Subtracting the maximum changes nothing but the range: no exponent is above 0.",
    ),
    Rung(
        softmax.online,
        "Online softmax",
        "l ← l exp(m − m′) + exp(x − m′)",
        "The sum follows the maximum: when it grows from m to m′, one factor corrects all terms so far.",
    ),
    Rung(
        softmax.two_pass_attention,
        "Attention in two passes",
        "o = Σ exp(x − m) / l · v",
        "The weights are used as they are made. They never exist as a vector.",
    ),
    Rung(
        softmax.one_pass_attention,
        "Attention in one pass",
        "o ← o exp(m − m′) + exp(x − m′) v",
        "The output is a sum like l, so the same factor corrects it. The scores are read once.",
    ),
    Rung(
        softmax.tiled_attention,
        "Attention in tiles",
        "the same, for tiles of x and v",
        "Several scores at a time. This is FlashAttention's inner loop.",
    ),
    Rung(
        flash.flash_1_forward,
        "FlashAttention-1",
        "O ← (l exp(m − m′) O + exp(s − m′) V) / l′",
        "Many queries, with scores s = Q Kᵀ / √d made tile by tile. Tiles of keys are the outer loop: O, l and m live "
        "in slow memory and come back for each of them.",
    ),
    Rung(
        flash.flash_2_forward,
        "FlashAttention-2",
        "o ← o exp(m − m′) + exp(s − m′) V",
        "Tiles of queries are the outer loop: o, l and m stay in fast memory, and one division by l ends the tile.",
    ),
)


@dataclass(frozen=True)
class Measured:
    """A step of the ladder, run.

    result    on the example: the output, or softmax's mean of the values
    passes    times that the scores, or the keys that give them, were read
    held      the most numbers in fast memory at once, on the example with values of one number and tiles of two
    error     largest difference from torch's softmax in fp64 on random scores, relative to the largest value
    overflow  the smallest score at which the result is not finite, by precision; inf: none
    """

    rung: Rung
    result: float
    passes: float
    held: int
    error: float
    overflow: dict[str, float]


class Call(NamedTuple):
    """A step's tensors in slow memory, each with a separate count of moves, its arguments, and its output (d,)."""

    slow: dict[str, Slow]
    arguments: dict[str, Any]
    scores: Slow
    output: Callable[[], Tensor]


def prepare(function: Callable[..., None], x: Tensor, v: Tensor) -> Call:
    """A step of the ladder on scores x (N,) and values v (N, d).

    FlashAttention computes its scores itself: from one query and keys whose products are x.
    """
    names, d = inspect.signature(function).parameters, v.shape[1]

    def in_slow_memory(tensors: dict[str, Tensor]) -> SlowMemory:
        return SlowMemory({name: Slow(tensor, Traffic()) for name, tensor in tensors.items()})

    if "y" in names:
        slow = in_slow_memory({"x": x, "y": torch.zeros_like(x)})
        return Call(slow, slow, slow["x"], lambda: slow["y"].tensor @ v)
    if "x" in names:
        slow = in_slow_memory({"x": x, "v": v, "out": torch.zeros_like(v[:1])})
        return Call(slow, slow, slow["x"], lambda: slow["out"].tensor[0])
    q, k = torch.zeros_like(v[:1]), torch.zeros_like(v)
    q[:, 0], k[:, 0] = math.sqrt(d), x
    statistics = {"l": 0.0, "m": lowest(x.dtype)} if function is flash.flash_1_forward else {"lse": 0.0}
    rows = {name: torch.full_like(q[:, :1], value) for name, value in statistics.items()}
    slow = in_slow_memory({"Q": q, "K": k, "V": v, "O": torch.zeros_like(q), **rows})
    everything = torch.ones(1, len(x), dtype=torch.bool)
    arguments = {
        "hbm": slow, "B_r": 1, "B_c": 2, "see": lambda i, j: everything[i, j], "keep": lambda i, j: everything[i, j],
    }  # fmt: skip
    return Call(slow, arguments, slow["K"], lambda: slow["O"].tensor[0])


def run(function: Callable[..., None], x: Tensor, v: Tensor) -> Tensor:
    """The output of attention with scores x (N,) and values v (N, d) by a step of the ladder: (d,)."""
    call = prepare(function, x, v)
    function(**call.arguments)
    return call.output()


def overflow(function: Callable[..., None], dtype: torch.dtype) -> float:
    """The smallest score, of two equal ones, at which the result is not finite in `dtype`; inf where there is none."""

    def finite(score: float) -> bool:
        x = torch.full((2,), score, dtype=dtype)
        return bool(run(function, x, torch.ones(2, 1, dtype=dtype)).isfinite().all())

    low, high = 0.0, torch.finfo(dtype).max / 4
    if finite(high):
        return math.inf
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return high


def measure(ladder: Sequence[Rung] = LADDER) -> list[Measured]:
    """Run the ladder. Raises AssertionError where a step differs from fp64 by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    x, v = 3 * torch.randn(64, generator=generator), torch.randn(64, 8, generator=generator)
    exact = torch.softmax(x.double(), dim=0) @ v.double()
    measured = []
    for rung in ladder:
        out = run(rung.function, x, v).double()
        call = prepare(rung.function, EXAMPLE, EXAMPLE[:, None])
        recording = record(rung.function, call.slow, call.arguments)
        entry = Measured(
            rung=rung,
            result=call.output().item(),
            passes=call.scores.traffic.read / len(EXAMPLE),
            held=recording.most_in_fast_memory,
            error=((out - exact).abs().max() / exact.abs().max()).item(),
            overflow={name: overflow(rung.function, dtype) for name, dtype in PRECISIONS.items()},
        )
        if entry.error > TOLERANCE:
            raise AssertionError(f"{rung.title} is off by {entry.error:.2g}, more than rounding.")
        measured.append(entry)
    return measured


def without(function: Callable[..., None], mark: str) -> Callable[..., None]:
    """The function without the lines that contain a mark. Raises ValueError where none does."""
    lines = inspect.getsource(function).splitlines()
    others = [line for line in lines if mark not in line]
    if len(others) == len(lines):
        raise ValueError(f"{function.__name__} has no line with {mark!r}.")
    text, names = "\n".join(others), dict(function.__globals__)
    file = f"<{function.__name__} without {mark}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where `inspect` finds its source
    exec(compile(text, file, "exec", flags=__future__.annotations.compiler_flag), names)
    return names[function.__name__]


def silent_error() -> tuple[str, float, float]:
    """One pass over the example with the rescaling left out: the missing line, the wrong output and the right one.

    No number overflows and nothing is raised, but the output is wrong.
    """
    function = softmax.one_pass_attention
    (line,) = [line.strip() for line in inspect.getsource(function).splitlines() if RESCALING in line]
    wrong = run(without(function, RESCALING), EXAMPLE, EXAMPLE[:, None]).item()
    return line, wrong, run(function, EXAMPLE, EXAMPLE[:, None]).item()
