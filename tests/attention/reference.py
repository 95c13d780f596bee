"""Attention problems for tests: attention/check/formula.py and its judge are their reference.

tests/attention/test_check_judge.py compares that formula with PyTorch's attention and autograd in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention import AttentionConfig, AttentionOutput, DropoutKey, Layout, Score, build_attention, keep_mask, varlen
from attention.check.formula import Problem, evaluate
from attention.check.judge import judge
from attention.check.run import interpreting

KEY = DropoutKey(seed=1337, step=11, layer=3, first_sequence=5)


@dataclass(frozen=True)
class Case:
    """One attention problem: q (B, H, T, D) against k, v (B, H_kv, S, D).

    The scores are about normal, with mean `offset` and standard deviation `spread`. `documents` are lengths that add up
    to S; each further sequence of the batch has them in another order.
    """

    B: int
    H: int
    H_kv: int
    T: int
    S: int
    D: int
    causal: bool = True
    dropout: float = 0.0
    spread: float = 1.0
    offset: float = 0.0
    window: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    documents: tuple[int, ...] = ()

    @property
    def score(self) -> Score:
        return Score(self.causal, self.window, self.soft_cap, self.alibi, self.sinks)

    def document_ids(self) -> Tensor:
        """(B, S) int64: the number of the document that each position belongs to."""
        ids, n = torch.arange(len(self.documents)), len(self.documents)
        rows = [self.documents[b % n :] + self.documents[: b % n] for b in range(self.B)]
        return torch.stack([ids.repeat_interleave(torch.tensor(row)) for row in rows])

    def layout(self, device: torch.device | str = "cpu") -> Layout:
        """The documents as a call takes them."""
        if not self.documents:
            return Layout()
        same = self.document_ids()[:, :, None] == self.document_ids()[:, None, :]  # (B, S, S)
        starts = same.int().argmax(dim=-1)
        return Layout(document_starts=starts.int().to(device), document_ends=(starts + same.sum(-1)).int().to(device))

    def sink_logits(self, device: torch.device | str = "cpu") -> Tensor | None:
        """(H,) fp32."""
        return torch.linspace(-1.5, 2.0, self.H).to(device) if self.sinks else None

    def visible(self) -> Tensor:
        """(B, T, S) bool, by the definitions of Score and Layout."""
        i, j = torch.arange(self.S - self.T, self.S)[:, None], torch.arange(self.S)[None, :]
        seen = torch.ones(self.B, self.T, self.S, dtype=torch.bool)
        if self.causal:
            seen &= j <= i
        if self.window is not None:
            seen &= i - j < self.window
        if self.documents:
            ids = self.document_ids()
            of_query = torch.where(i[:, 0] >= 0, ids[:, i[:, 0].clamp(min=0)], -1)  # (B, T)
            seen &= of_query[:, :, None] == ids[:, None, :]
        return seen

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of out, drawn in fp64 and rounded to `dtype`; the same on every device."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            return torch.randn(self.B, heads, length, self.D, generator=generator, dtype=torch.float64)

        q, k = normal(self.H, self.T) * self.spread**0.5, normal(self.H_kv, self.S) * self.spread**0.5
        if self.offset:
            q[..., 0] = (abs(self.offset) * self.D**0.5) ** 0.5
            k[..., 0] = math.copysign((abs(self.offset) * self.D**0.5) ** 0.5, self.offset)
        return tuple(x.to(dtype).to(device) for x in (q, k, normal(self.H_kv, self.S), normal(self.H, self.T)))

    def problem(
        self, device: torch.device | str = "cpu", sinks: Tensor | None = None, key: DropoutKey = KEY
    ) -> Problem:
        """What the reference computes, with the mask of `key` where weights are dropped."""
        distance = torch.arange(self.S - self.T, self.S)[:, None] - torch.arange(self.S)
        shift = torch.tensor(published_slopes(self.H), dtype=torch.float64)[:, None, None] * -distance
        keep = keep_mask(key, self.dropout, self.B, self.H, self.T, self.S, device=device) if self.dropout else None
        return Problem(
            scale=self.D**-0.5,
            seen=self.visible()[:, None].to(device),
            soft_cap=self.soft_cap,
            shift=shift.to(device) if self.alibi else None,
            sinks=self.sink_logits(device) if sinks is None else sinks,
            keep=keep,
            keep_scale=256 / (256 - round(256 * self.dropout)),
        )


def published_slopes(n_heads: int) -> list[float]:
    """The slopes as Press et al. publish them (github.com/ofirpress/attention_with_linear_biases)."""

    def powers(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n_heads).is_integer():
        return powers(n_heads)
    below = 2 ** math.floor(math.log2(n_heads))
    return powers(below) + powers(2 * below)[0::2][: n_heads - below]


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
    case: Case | None = None,
    keep: Tensor | None = None,
    rate: float = 0.0,
) -> Tensor:
    """The reference's output, in the precision of its inputs throughout.

    case   the options of attention where there are more than `causal`; without its dropout
    keep   (B, H, T, S) bool, the weights that dropout keeps, and `rate` the probability of dropping that it realises
    """
    case = case or Case(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal=causal)
    asked = replace(replace(case, dropout=0.0).problem(q.device, sinks), keep=keep, keep_scale=1 / (1 - rate))
    return evaluate(q, k, v, torch.zeros_like(q), asked).results["out"]


def gradients(
    attend: Callable[..., Tensor | AttentionOutput], *tensors: Tensor, sinks: Tensor | None = None
) -> dict[str, Tensor]:
    """out and the gradients of q, k, v and, where they are given, the sinks, in fp64, for the tensors q, k, v and dout;
    and the log-sum-exp where it is returned.

    attend  called with q, k and v, and with the sinks after them
    """
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if sinks is None else [sinks]))]
    out, lse = attend(*leaves), None
    if isinstance(out, AttentionOutput):
        out, lse = out
    found = {"out": out} | dict(zip(("dq", "dk", "dv", "dsinks"), torch.autograd.grad(out, leaves, dout), strict=False))
    found |= {} if lse is None else {"lse": lse}
    return {name: x.detach().double() for name, x in found.items()}


def gradients_with_slopes(
    case: Case, config: AttentionConfig, tensors: Sequence[Tensor], slopes: Sequence[float]
) -> dict[str, Tensor]:
    """`gradients` of the implementation that `config` names, for the tensors q, k, v and dout, with ALiBi's slopes."""
    attend, device = build_attention(replace(config, dropout=case.dropout)), tensors[0].device
    options: Any = {"score": case.score, "layout": case.layout(device), "slopes": torch.tensor(slopes, device=device)}

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> AttentionOutput:
        return attend(q, k, v, sinks=sinks, dropout_key=KEY, **options)

    return gradients(run, *tensors, sinks=case.sink_logits(device))


def assert_accurate(
    attend: Callable[..., AttentionOutput],
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    lse: bool = False,
) -> None:
    """The check's judge finds nothing but rounding in out, all gradients and, if asked, the log-sum-exp."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> AttentionOutput:
        options: Any = {"return_lse": True} if lse else {}
        return attend(q, k, v, score=case.score, layout=case.layout(device), sinks=sinks, dropout_key=KEY, **options)

    tensors = case.tensors(dtype, device)
    with interpreting():
        got = gradients(run, *tensors, sinks=case.sink_logits(device))
    assert_rounding(tensors, case.problem(device), got, f"{case}, {dtype}")


def assert_rounding(tensors: Sequence[Tensor], asked: Problem, got: dict[str, Tensor], of: str = "") -> None:
    """The check's judge finds nothing but rounding in the results of a problem for the tensors q, k, v and dout."""
    q, k, v, dout = tensors
    results: dict[str, Tensor | None] = {n: x.float() if n in ("lse", "dsinks") else x for n, x in got.items()}
    for verdict in judge(q, k, v, dout, asked, results):
        assert verdict.passes, f"{verdict} ({of})"


def assert_packed_is_accurate(attend: Any, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """The documents of a case as sequences of any length in one call of `varlen`; one of them may be empty."""
    tensors = case.tensors(dtype, device)
    bounds = torch.tensor([0, *case.documents]).cumsum(0)
    got = gradients(
        partial(varlen, attend, cu_seqlens=bounds, score=case.score), *(x[0].transpose(0, 1) for x in tensors)
    )
    assert_rounding(tensors, case.problem(device), {n: x.transpose(0, 1)[None] for n, x in got.items()}, str(case))


def assert_cut_is_accurate(
    attend: Any,
    case: Case,
    rows: tuple[int, int],
    columns: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> None:
    """Some queries of a case with keys that include all that they see, by q_start and k_start."""
    cut = slice(*rows), slice(*columns)
    asked = case.problem(device)
    shift = None if asked.shift is None else asked.shift[:, *cut]
    q, k, v, dout = case.tensors(dtype, device)
    tensors = q[:, :, cut[0]], k[:, :, cut[1]], v[:, :, cut[1]], dout[:, :, cut[0]]
    layout = case.layout(device)._replace(q_start=rows[0], k_start=columns[0])

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> AttentionOutput:
        return attend(q, k, v, score=case.score, layout=layout, sinks=sinks)

    got = gradients(run, *tensors, sinks=case.sink_logits(device))
    asked = replace(asked, seen=asked.seen[:, :, *cut], shift=shift)
    assert_rounding(tensors, asked, got, f"queries {rows}, keys {columns}, {case}")


def assert_unseen_tiles_are_never_read(
    attend: Any, case: Case, dtype: torch.dtype, device: str, rows: dict[str, int], keys: int
) -> None:
    """A NaN in a tile that is read reaches the results, even where its weight is zero.

    rows  of the tiles of queries with which out and dq are computed; `keys`: of all tiles of keys
    """
    q, k, v, do = case.tensors(dtype, device)
    seen, layout = case.visible()[0].to(device), case.layout(device)

    def run(*tensors: Tensor) -> dict[str, Tensor]:
        return gradients(lambda *qkv: attend(*qkv, score=case.score, layout=layout), *tensors)

    def with_nan(x: Tensor, tile: slice) -> Tensor:
        bad = x.clone()
        bad[:, :, tile] = torch.nan
        return bad

    def assert_equal(name: str, got: dict[str, Tensor], tiles: Tensor, length: int) -> None:
        reached = tiles.repeat_interleave(length)
        spared.append(int((~reached).sum()))
        assert torch.equal(got[name][:, :, ~reached], clean[name][:, :, ~reached]), name

    spared: list[int] = []
    clean = run(q, k, v, do)
    for start in range(0, case.S, keys):
        tile = slice(start, start + keys)
        got = run(q, with_nan(k, tile), with_nan(v, tile), do)
        for name, length in rows.items():
            assert_equal(name, got, seen[:, tile].unflatten(0, (-1, length)).any(2).any(1), length)
    for start in range(0, case.T, rows["dq"]):
        tile = slice(start, start + rows["dq"])
        got = run(with_nan(q, tile), k, v, with_nan(do, tile))
        for name in ("dk", "dv"):
            assert_equal(name, got, seen[tile].unflatten(1, (-1, keys)).any(2).any(0), keys)
    assert sum(spared) > 0


def assert_far_tiles_are_never_read(
    run: Callable[[tuple[Tensor, ...]], dict[str, Tensor]], tensors: Sequence[Tensor], tile: int, far: Sequence[bool]
) -> None:
    """A NaN in a tile that is read reaches the results, even where its weight is zero.

    run  called with q, k, v and dout
    far  of each head, whether its last `tile` queries see nothing of its first `tile` keys
    """
    q, k, v, do = tensors
    bad_v, bad_do = v.clone(), do.clone()
    bad_v[:, :, :tile] = bad_do[:, :, -tile:] = torch.nan
    found, found_back = run((q, k, bad_v, do)), run((q, k, v, bad_do))
    for head, spared in enumerate(far):
        ends = (found[name][:, head, -tile:] for name in ("out", "dq"))
        starts = (found_back[name][:, head, :tile] for name in ("dk", "dv"))
        assert all(x.isnan().any().item() != spared for x in (*ends, *starts)), head


def flops_of_tiles(case: Case, block_q: int, block_k: int) -> int:
    """FLOPs of the products, forward and backward, of one head that visits the tiles in which something is seen.

    The forward makes two products of a tile, without the columns after the last that its rows see; the backward five.
    """
    scores = 0
    for rows in case.visible()[0].split(block_q):
        last = int(rows.any(dim=0).nonzero().max()) + 1 if rows.any() else 0
        for j, tile in enumerate(rows.split(block_k, dim=1)):
            if tile.any():
                forward = len(rows) * (min((j + 1) * block_k, last) - j * block_k)
                scores += 2 * forward + 5 * tile.numel()
    return 2 * case.D * scores
