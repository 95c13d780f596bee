"""What each step of the ladder reads and holds, where it overflows, and what goes wrong silently without one line."""

from __future__ import annotations
import __future__

import inspect
import linecache
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learn import softmax
from learn.memory import Slow, Traffic
from learn.tracing import record

EXAMPLE = torch.arange(1.0, 7.0)  # scores and values 1 to 6: the output is 5.4329
RESCALING = "# rescale"  # marks the line of softmax.py that takes old sums to a new maximum
# Rounding of fp32 sums of a few positive terms; a wrong formula is off by orders of magnitude more.
TOLERANCE = 1e-5
PRECISIONS = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: the function, its formula, and what is new in it."""

    function: Callable[..., None]
    title: str
    formula: str
    idea: str

    @property
    def attends(self) -> bool:
        """Whether it computes attention rather than softmax."""
        return "v" in inspect.signature(self.function).parameters


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
)


@dataclass(frozen=True)
class Measured:
    """A step of the ladder, run.

    result    on the example: the output, or softmax's mean of the values
    passes    times that the scores were read
    holds     numbers in fast memory at most, for values of one number each
    error     largest difference from fp64 on random scores, relative to the largest value
    apart     largest difference from the step before, on the same random scores
    overflow  the smallest score at which the result is not finite, by precision; inf: none
    """

    rung: Rung
    result: float
    passes: float
    holds: int
    error: float
    apart: float
    overflow: dict[str, float]


def run(function: Callable[..., None], x: Tensor, v: Tensor) -> tuple[Tensor, Traffic]:
    """The output of attention with scores x (N,) and values v (N, d) by a step of the ladder: (d,), and its traffic."""
    traffic = Traffic()
    if "v" in inspect.signature(function).parameters:
        out = Slow(torch.zeros(1, v.shape[1], dtype=x.dtype), traffic)
        function(Slow(x, traffic), Slow(v, traffic), out)
        return out.tensor[0], traffic
    y = Slow(torch.zeros_like(x), traffic)
    function(Slow(x, traffic), y)
    return y.tensor @ v, traffic


def passes(function: Callable[..., None], N: int = 64) -> float:
    """Times that a function reads its scores from slow memory."""
    scores = Slow(torch.randn(N, generator=torch.Generator().manual_seed(0)), Traffic())
    rest = {"v": Slow(torch.ones(N, 1), Traffic()), "out": Slow(torch.zeros(1, 1), Traffic())}
    if "v" not in inspect.signature(function).parameters:
        rest = {"y": Slow(torch.zeros(N), Traffic())}
    function(scores, **rest)
    return scores.traffic.read / N


def holds(function: Callable[..., None]) -> int:
    """The most numbers that a function's names hold at once, on the example."""
    traffic = Traffic()
    slow = {"x": Slow(EXAMPLE, traffic)}
    if "v" in inspect.signature(function).parameters:
        slow |= {"v": Slow(EXAMPLE[:, None], traffic), "out": Slow(torch.zeros(1, 1), traffic)}
    else:
        slow |= {"y": Slow(torch.zeros(6), traffic)}
    return record(function, slow, {}).most_in_fast_memory


def overflow(function: Callable[..., None], dtype: torch.dtype) -> float:
    """The smallest score, of two equal ones, at which the result is not finite in `dtype`; inf where there is none."""

    def finite(score: float) -> bool:
        x = torch.full((2,), score, dtype=dtype)
        return bool(run(function, x, torch.ones(2, 1, dtype=dtype))[0].isfinite().all())

    low, high = 0.0, torch.finfo(dtype).max / 4
    if finite(high):
        return math.inf
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if finite(middle) else (low, middle)
    return high


def measure(ladder: Sequence[Rung] = LADDER) -> list[Measured]:
    """Run the ladder. Raises AssertionError where a step differs from fp64 or the one before by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    x, v = 3 * torch.randn(64, generator=generator), torch.randn(64, 8, generator=generator)
    exact = softmax.reference_softmax(x) @ v.double()
    measured: list[Measured] = []
    before = exact
    for rung in ladder:
        out = run(rung.function, x, v)[0].double()
        entry = Measured(
            rung=rung,
            result=run(rung.function, EXAMPLE, EXAMPLE[:, None])[0].item(),
            passes=passes(rung.function),
            holds=holds(rung.function),
            error=((out - exact).abs().max() / exact.abs().max()).item(),
            apart=((out - before).abs().max() / exact.abs().max()).item(),
            overflow={name: overflow(rung.function, dtype) for name, dtype in PRECISIONS.items()},
        )
        if max(entry.error, entry.apart) > TOLERANCE:
            raise AssertionError(f"{rung.title} is off by {max(entry.error, entry.apart):.2g}, more than rounding.")
        measured.append(entry)
        before = out
    return measured


def without(function: Callable[..., None], mark: str) -> Callable[..., None]:
    """The function with the lines left out that bear a mark. Raises ValueError where none does."""
    lines = inspect.getsource(function).splitlines()
    kept = [line for line in lines if mark not in line]
    if len(kept) == len(lines):
        raise ValueError(f"{function.__name__} has no line with {mark!r}.")
    text, names = "\n".join(kept), dict(function.__globals__)
    file = f"<{function.__name__} without {mark}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # where `inspect` finds its source
    exec(compile(text, file, "exec", flags=__future__.annotations.compiler_flag), names)
    return names[function.__name__]


def silent_error() -> tuple[str, float, float]:
    """One pass over the example with the rescaling left out: the missing line, the wrong output and the right one.

    No number overflows and nothing is raised: the output is simply another one.
    """
    function = softmax.one_pass_attention
    (line,) = [line.strip() for line in inspect.getsource(function).splitlines() if RESCALING in line]
    wrong = run(without(function, RESCALING), EXAMPLE, EXAMPLE[:, None])[0].item()
    right = run(function, EXAMPLE, EXAMPLE[:, None])[0].item()
    return line, wrong, right
