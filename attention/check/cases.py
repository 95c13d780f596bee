"""One call of attention as plain values, and the tensors and the problem that follow from them."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..layout import Layout
from ..score import Score
from .calls import problem_of
from .formula import Problem

# Memory layouts of q, k, v and the gradient of out: expressions in x, which programs that show a failure contain too.
MEMORY = {
    "contiguous": "x",
    "heads between tokens": "x.transpose(1, 2).contiguous().transpose(1, 2)",
    "part of a wider tensor": "torch.nn.functional.pad(x, (3, 6))[..., 3:-6]",
    "misaligned start": "torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)",
    "channels not adjacent": "x.mT.contiguous().mT",
    "every other token": "x.repeat_interleave(2, dim=2)[:, :, ::2]",
    "one head for all": "x[:, :1].expand_as(x)",
    "batch innermost": "x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)",
}
# Factors of the keys, (S, 1). They make the running maximum of a row grow steadily, or jump now and then.
TRENDS = {
    "none": "1.0",
    "rising": "torch.linspace(0, 6, S).unsqueeze(1)",
    "jumping": "1 + 30.0 * (torch.arange(S) % 61 == 60).unsqueeze(1)",
}
# Factors of the queries, (T, 1).
ROWS = {
    "none": "1.0",
    "tilted": "torch.linspace(-1, 1, T).unsqueeze(1)",
    "some zero": "(torch.arange(T) % 3 > 0).unsqueeze(1)",
}
# Which of the keys that it would see a query does see, of sequence b, head h, query i and key j.
PATTERNS = {
    "all": "i + j >= 0",
    "one in three": "(i - j) % 3 == 0",
    "blocks": "(i // 32 + j // 32) % 2 == 0",
    "by head": "(h % 2 == 0) | (i - j < 40)",
    "by sequence": "(j % (b + 2) > 0) | (i == j)",
    "prefix": "(j <= i) | (j < 17)",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Case:
    """One attention problem: q (B, H, T, D) against k, v (B, H_kv, S, D).

    top_left   with causal: query i sees key j if j <= i; otherwise if j <= i + S - T, so the last one sees all keys
    window     the number of keys that a query sees, the key at its position included
    documents  lengths of documents, which add up to S = T; each further sequence of the batch has another order
    scale      of the scores; None: D ** -0.5
    dropout    probability of dropping a weight
    spread     standard deviation of the scores
    size       standard deviation of v and, where it is below 1, of the gradient of out
    memory     one of MEMORY
    trend      one of TRENDS
    rows       one of ROWS
    shift      added to the scores of a row, times its factor of ROWS, by the first channels of q and k
    mask       the visible keys come as a mask tensor or a block mask
    pattern    one of PATTERNS
    """

    B: int = 1
    H: int = 2
    H_kv: int = 2
    T: int = 64
    S: int = 64
    D: int = 16
    causal: bool = True
    dtype: str = "fp32"
    top_left: bool = False
    window: int | None = None
    documents: tuple[int, ...] = ()
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    bias: bool = False
    scale: float | None = None
    dropout: float = 0.0
    spread: float = 1.0
    size: float = 1.0
    memory: str = "contiguous"
    trend: str = "none"
    rows: str = "none"
    shift: float = 0.0
    mask: bool = False
    pattern: str = "all"
    seed: int = 0

    def features(self) -> set[str]:
        """The declared features that a call of this case needs."""
        needs = {
            "causal": self.causal,
            "full": not self.causal,
            "window": self.window is not None,
            "documents": self.documents,
            "soft_cap": self.soft_cap is not None,
            "alibi": self.alibi,
            "sinks": self.sinks,
            "bias": self.bias,
            "scale": self.scale is not None,
            "dropout": self.dropout > 0,
            "grouped": self.H_kv != self.H,
            "document_rows": self.documents and self.B > 1,
            "empty": self.causal and not self.top_left and self.T > self.S,
            "top_left": self.top_left,
            "mask": self.mask or self.pattern != "all",
        }
        return {name for name, needed in needs.items() if needed}

    def document_lengths(self) -> list[tuple[int, ...]]:
        """The lengths of the documents in each sequence."""
        shifts = [b % max(len(self.documents), 1) for b in range(self.B)]
        return [self.documents[n:] + self.documents[:n] for n in shifts]

    def document_starts(self) -> list[list[int]]:
        """The start of the document at each position of each sequence."""
        return [
            [sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)]
            for lengths in self.document_lengths()
        ]

    def actual_scale(self) -> float:
        return 1 / math.sqrt(self.D) if self.scale is None else self.scale

    def first_position(self) -> int:
        """The position of the first query; the first key has position 0."""
        return 0 if self.top_left else self.S - self.T

    def sees(self) -> str:
        """Whether query i of sequence b and head h sees key j, as code."""
        first = self.first_position()
        position = f"i + {first}" if first else "i"
        conditions = {
            f"({PATTERNS[self.pattern]})": self.pattern != "all",
            f"(j <= {position})": self.causal,
            f"({position} - j < {self.window})": self.window is not None,
            "(starts[b, i] == starts[b, j])": self.documents,
        }
        return " & ".join(code for code, holds in conditions.items() if holds) or PATTERNS["all"]

    def words(self) -> str:
        """The case on one line."""
        changed = [
            f"{name}={getattr(self, name)}"
            for name in Case.__dataclass_fields__
            if name not in ("T", "S", "D", "B", "H", "H_kv", "dtype", "seed")
            and getattr(self, name) != getattr(Case, name)
        ]
        heads = f"H={self.H}" if self.H_kv == self.H else f"H={self.H}/{self.H_kv}"
        return ", ".join([f"{self.dtype} B={self.B} {heads} T={self.T} S={self.S} D={self.D}", *changed])


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case. `starts`, (B, S) int32: the document's start at each position; others as in Problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    starts: Tensor | None = None


def drawn(case: Case, device: torch.device) -> list[str]:
    """The lines that draw q, k, v, do and, where the case has them, slopes, sinks, bias and starts.

    Normal numbers of torch's generator in fp64, drawn on the CPU and rounded: the same on every device.
    """
    dtype, there = str(DTYPES[case.dtype]), "" if device.type == "cpu" else f"{str(device)!r}, "
    here = f".to({str(device)!r})" if there else ""
    root = (case.spread / (abs(case.actual_scale()) * case.D**0.5)) ** 0.5
    sizes: list[float | str] = [root, root, case.size, min(case.size, 1.0)]
    if case.trend != "none":
        sizes[1] = f"{root!r} * ({TRENDS[case.trend].replace('S', str(case.S))})"
    rows = ROWS[case.rows].replace("T)", f"{case.T})")
    if case.rows != "none":
        sizes[0] = f"{root!r} * {rows}"
    shapes = [(case.H, case.T), (case.H_kv, case.S), (case.H_kv, case.S), (case.H, case.T)]
    x, each = f"torch.randn({case.B}, h, n, {case.D}, dtype=torch.float64)", f"h, n in {tuple(shapes)}"
    if sizes != [1.0] * 4:
        each = ", ".join(f"({h}, {n}, {size})" for (h, n), size in zip(shapes, sizes, strict=True))
        x, each = f"(a * {x})", f"h, n, a in ({each})"
    lines = [f"q, k, v, do = ({x}.to({there}{dtype}) for {each})"]
    if case.memory != "contiguous":
        lines += [f"q, k, v, do = ({MEMORY[case.memory]} for x in (q, k, v, do))"]
    if case.shift:
        lines += [f"q[..., :1], k[..., :1] = {rows}, {case.shift / case.actual_scale()!r}"]
    if case.alibi:
        lines += [f"slopes = torch.exp2(-8 * torch.arange(1, {case.H + 1}) / {case.H}){here}"]
    if case.sinks:
        lines += [f"sinks = torch.linspace(-1.5, 2.0, {case.H}){here}"]
    if case.bias:
        lines += [f"bias = torch.randn(1, {case.H}, {case.T}, {case.S}, dtype=torch.float64).to({there}{dtype})"]
    if case.documents:
        lines += [f"starts = torch.tensor({case.document_starts()}, dtype=torch.int32){here}"]
    return lines


def draw(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The tensors of `drawn`, as a program that starts from the case's seed has them."""
    names: dict[str, Any] = {"torch": torch}
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(case.seed)
        exec("\n".join(drawn(case, torch.device(device))), names)
    return Inputs(**{name: x for name, x in names.items() if name in Inputs.__dataclass_fields__})


def problem(case: Case, inputs: Inputs, keep: Tensor | None = None) -> Problem:
    """The reference problem of a case; `keep` as in Problem, where the case drops weights."""
    asked = problem_of(
        inputs.q,
        inputs.k,
        score=Score(case.causal, case.window, case.soft_cap, case.alibi, case.sinks),
        layout=Layout(case.first_position(), document_starts=inputs.starts),
        scale=case.scale,
        tensors={"slopes": inputs.slopes, "sinks": inputs.sinks},
    )(slice(0, case.H))
    if case.pattern != "all":
        lengths = enumerate((case.B, case.H, case.T, case.S))
        places = (torch.arange(n, device=inputs.q.device).view(-1, *[1] * (3 - axis)) for axis, n in lengths)
        asked = replace(asked, seen=asked.seen & eval(PATTERNS[case.pattern], dict(zip("bhij", places, strict=True))))
    return replace(asked, bias=inputs.bias, keep=keep, keep_scale=1 / (1 - case.dropout))
