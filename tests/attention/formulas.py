"""Random problems for scores by formula: Python evaluates the text, and the check's formula the attention."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention import AttentionOutput, DropoutKey, Layout, Score, documents, keep_mask
from attention.check.formula import Problem as Reference
from attention.check.formula import evaluate
from tests.attention.reference import KEY, gradients

Maker = Callable[[int, int, int], dict[str, Tensor]]  # of sequences, heads and positions


def forgetting(B: int, H: int, L: int) -> dict[str, Tensor]:
    return {"c": torch.cumsum(-torch.rand(B, H, L) * 0.3, -1)}


# The formula, and what draws its tensors. Those of the second part have a value everywhere, for attention to all keys.
FORMULAS: dict[str, Maker] = {
    "s * log(n + 1)": lambda B, H, L: {},
    "a[h] * s": lambda B, H, L: {"a": torch.randn(H)},
    "s - slope[h] * (i - j)": lambda B, H, L: {"slope": torch.rand(H) * 0.2},
    "3 * tanh(s / 3)": lambda B, H, L: {},
    "s + c[h, i] - c[h, j]": forgetting,
    "s + bias[h, min(abs(i - j), 31)]": lambda B, H, L: {"bias": torch.randn(H, 32)},
    "s + bias[h, min(floor(4 * log(abs(i - j) + 1)), 15)]": lambda B, H, L: {"bias": torch.randn(H, 16)},
    "s + pair[h, i, j]": lambda B, H, L: {"pair": torch.randn(H, L, L)},
    "s + table[j, i]": lambda B, H, L: {"table": torch.randn(L, L)},
    "2 * tanh(s / 2) - slope[h] * (i - j)": lambda B, H, L: {"slope": torch.rand(H) * 0.1},
    "s + log(sigmoid(g[h, j]))": lambda B, H, L: {"g": torch.randn(H, L)},
    "s + w[h] * s * s": lambda B, H, L: {"w": torch.rand(H) * 0.1},
    "where(i - j < 40, s, s * far[h])": lambda B, H, L: {"far": torch.rand(H)},
    "s - a[h] * (i - j) ** 2": lambda B, H, L: {"a": torch.rand(H) * 1e-3},
    "a * s + u[h, i] * tanh(s)": lambda B, H, L: {"a": torch.tensor(1.3), "u": torch.randn(H, L)},
    "s + g[h, j] * tanh(s) + row[h, i]": lambda B, H, L: {"g": torch.randn(H, L) * 0.3, "row": torch.randn(H, L)},
    "s + grid[max(i // 7 - j // 7, -40) + 40, h]": lambda B, H, L: {"grid": torch.randn(81, H)},
    "s * (1 + 0.5 * sin(0.3 * (i - j)))": lambda B, H, L: {},
    "max(s, -1) - exp(-abs(s)) * m[h]": lambda B, H, L: {"m": torch.rand(H)},
    "s + x[b, h, i] * y[b, h, j]": lambda B, H, L: {"x": torch.randn(B, H, L), "y": torch.randn(B, H, L)},
    "s + a / (abs(i - j) + 1)": lambda B, H, L: {"a": torch.randn(())},
    "tanh(s) / r[h, i]": lambda B, H, L: {"r": 1 + torch.rand(H, L)},
    # causal only
    "s * sqrt(i + 1) - log(i - j + 1) * d[h]": lambda B, H, L: {"d": torch.rand(H)},
    "s + bias[h, min(i - j, 7)] * s": lambda B, H, L: {"bias": torch.randn(H, 8) * 0.2},
    "s * log(n)": lambda B, H, L: {},  # 0 for a query that sees one key; 0 times a hidden score of -inf would be nan
}
CAUSAL_ONLY = list(FORMULAS)[-3:]


def words(dtype: torch.dtype) -> dict[str, Any]:
    """The functions of formulas; real numbers have this dtype."""

    def of_real(name):
        return lambda x: getattr(torch, name)(x.to(dtype))

    return {
        **{name: of_real(name) for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos")},
        "abs": torch.abs,
        "floor": lambda x: torch.floor(x).long(),
        "where": torch.where,
        "min": lambda a, b: both(torch.minimum, a, b),
        "max": lambda a, b: both(torch.maximum, a, b),
    }


def both(function: Callable[[Tensor, Tensor], Tensor], a: Any, b: Any) -> Tensor:
    """A function of two tensors, one of which may be a number."""
    like = a if isinstance(a, Tensor) else b
    return function(*(x if isinstance(x, Tensor) else torch.tensor(x, dtype=like.dtype) for x in (a, b)))


@dataclass(frozen=True)
class Problem:
    """One call: q (B, H, T, D), k and v (B, H_kv, S, D), the formula's tensors, and who sees whom."""

    text: str
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    tensors: dict[str, Tensor]
    score: Score
    layout: Layout
    first: int  # position of the first query; keys begin at layout.k_start
    dropout: float
    sinks: Tensor | None

    def seen(self) -> Tensor:
        """(B, T, S): whether each query sees each key."""
        (B, _, T, _), S = self.q.shape, self.k.shape[2]
        i, j = torch.arange(T)[:, None] + self.first, torch.arange(S) + self.layout.k_start
        seen = torch.ones(B, T, S, dtype=torch.bool)
        if self.score.causal:
            seen &= j <= i
        if self.score.window is not None:
            seen &= i - j < self.score.window
        if (starts := self.layout.document_starts) is not None:
            document = starts.long()
            seen &= document[:, i[:, 0], None] == document[:, None, j]
        return seen

    def scores(self, q: Tensor, k: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """(B, H, T, S) in fp32 or better, -inf where a query does not see a key."""
        (B, H, T, D), S = q.shape, k.shape[2]
        k = k.repeat_interleave(H // k.shape[1], 1)
        s = (q / D**0.5 @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
        seen = self.seen()
        i = (torch.arange(T) + self.first).clamp(min=0)[:, None]
        j = torch.arange(S) + self.layout.k_start
        j = torch.where(seen, j, i)[:, None] if self.score.causal else j  # has a value everywhere
        b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
        n = seen.sum(-1).clamp(min=1)[:, None, :, None]
        names: dict[str, Any] = {"s": s, "i": i, "j": j, "h": h, "b": b, "n": n}
        axes = self.score.tensors()  # a batch may stand before the indices that the formula has
        names |= {name: Batched(x, b) for name, x in tensors.items() if x.ndim > len(axes[name])}
        changed = eval(self.text, {"__builtins__": {}, **words(s.dtype)}, {**tensors, **names})
        return torch.where(seen[:, None], changed.expand(B, H, T, S), -torch.inf)

    def evaluated(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, **tensors: Tensor
    ) -> dict[str, Tensor]:
        """out (B, H, T, D) and lse (B, H, T)."""
        seen, keep = self.seen()[:, None], None
        if self.dropout:
            keep = keep_mask(KEY, self.dropout, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        scale = 256 / (256 - round(256 * self.dropout))
        scores = self.scores(q, k, tensors)
        asked = Reference(0.0, seen, bias=scores, sinks=sinks, keep=keep, keep_scale=scale)
        return evaluate(q, k, v, torch.zeros_like(q), asked).results

    def results(self, dtype: torch.dtype, of: torch.dtype) -> dict[str, Tensor]:
        """out and all gradients computed in `dtype`, for q, k and v rounded to `of`."""
        wide = torch.promote_types(dtype, torch.float32)
        return gradients(
            lambda *qkv, **others: self.evaluated(*qkv, **others)["out"],
            *(x.to(of).to(dtype) for x in (self.q, self.k, self.v, self.do)),
            **{name: x.to(wide) for name, x in self.learned().items()},
        )

    def learned(self) -> dict[str, Tensor]:
        """The formula's tensors and the sinks, by name."""
        return self.tensors | ({} if self.sinks is None else {"sinks": self.sinks})

    def computed(
        self, attend: Callable[..., AttentionOutput], dtype: torch.dtype, backward: bool = True, device: str = "cpu"
    ) -> dict[str, Tensor]:
        """out and all gradients of an implementation."""
        starts = self.layout.document_starts
        layout = self.layout if starts is None else documents(starts.to(device))

        def run(q, k, v, sinks=None, **tensors):
            key: DropoutKey | None = KEY if self.dropout else None
            options: dict[str, Any] = {"score": self.score, "layout": layout, "dropout_key": key, "sinks": sinks}
            return attend(q, k, v, **options, tensors=tensors).out

        q, k, v, do = (x.to(dtype).to(device) for x in (self.q, self.k, self.v, self.do))
        wide = torch.promote_types(dtype, torch.float32)
        learned = {name: x.to(wide).to(device) for name, x in self.learned().items()}
        found = gradients(run, q, k, v, do, **learned) if backward else {"out": run(q, k, v, **learned)}
        return {name: x.double().cpu() for name, x in found.items()}


class Batched:
    """A tensor with a batch before the axes that a formula indexes."""

    def __init__(self, x: Tensor, b: Tensor) -> None:
        self.x, self.b = x, b

    def __getitem__(self, index: tuple[Tensor, ...]) -> Tensor:
        return self.x[(self.b, *index)]


KINDS = ("square", "more keys", "more queries", "documents", "window", "offset", "full")


def draw(
    rng: random.Random,
    text: str,
    kind: str,
    longest: int = 130,
    head_dim: int | None = None,
    length: int | None = None,
    tensors: Maker | None = None,
) -> Problem:
    """A random problem of one of KINDS, of `length` tokens where it is given. `tensors`: for a text not in FORMULAS."""
    torch.manual_seed(rng.randrange(2**31))
    B, H_kv, G = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    H, D = H_kv * G, head_dim or rng.choice([16, 24])
    T = S = length or rng.choice([n for n in (19, 33, 70, 130) if n <= longest])
    if kind == "full" and text in CAUSAL_ONLY:
        kind = "square"
    sinks = torch.randn(H) if rng.random() < 0.3 else None
    score, layout, first = Score(formula=text, sinks=sinks is not None), Layout(), 0
    match kind:
        case "more keys":
            S += rng.choice([5, 64])
            first = S - T
        case "more queries":
            T += 3
            first = -3
        case "window":
            score = replace(score, window=rng.choice([5, 20, 64]))
        case "full":
            score = replace(score, causal=False)
        case "offset":
            first = 9
            layout = Layout(q_start=first, k_start=2)
        case "documents":
            starts = torch.zeros(B, T, dtype=torch.int32)
            for cut in sorted(rng.sample(range(1, T), 3)):
                starts[:, cut:] = cut
            layout = documents(starts)
    drawn = (tensors or FORMULAS[text])(B, H, max(T, S) + 12)
    return Problem(
        text,
        torch.randn(B, H, T, D),
        torch.randn(B, H_kv, S, D),
        torch.randn(B, H_kv, S, D),
        torch.randn(B, H, T, D),
        drawn,
        score,
        layout,
        first,
        rng.choice([0.0, 0.0, 0.25]),
        sinks,
    )


def assert_right(
    problem: Problem,
    attend: Callable[..., AttentionOutput],
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
    device: str = "cpu",
) -> None:
    """Each result is within twice the error of the formula in `dtype`, and a few roundings of its largest value."""
    exact, plain = problem.results(torch.float64, dtype), problem.results(dtype, dtype)
    got = problem.computed(attend, dtype, backward, device)
    roundings = {torch.float32: 2e-5, torch.float64: 1e-13}.get(dtype, torch.finfo(dtype).eps)
    for name, value in got.items():
        want = exact[name]
        error, expected = (value - want).abs().max().item(), (plain[name] - want).abs().max().item()
        allowed = 2 * expected + roundings * max(want.abs().max().item(), 0.01)
        where = f"{problem.score}, {problem.layout}, {tuple(problem.q.shape)}, {tuple(problem.k.shape)}"
        assert error <= allowed, f"{name} of {problem.text}: {error:.1e}, of which {allowed:.1e} is rounding ({where})"
