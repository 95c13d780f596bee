"""Attention problems for tests: attention/check/formula.py and its judge are their reference.

tests/attention/test_check_judge.py compares that formula with PyTorch's attention and autograd in fp64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention import (
    Attention,
    AttentionConfig,
    AttentionOutput,
    DropoutKey,
    Layout,
    Score,
    build_attention,
    documents,
    keep_mask,
    varlen,
)
from attention.check import cases as checked
from attention.check.calls import problem_of
from attention.check.formula import Problem, evaluate
from attention.check.judge import judge
from attention.check.run import interpreting

KEY = DropoutKey(seed=1337, step=11, layer=3, first_sequence=5)


@dataclass(frozen=True)
class Case(checked.Case):
    """A case of the check as a call of an Attention. `offset` is the scores' mean. Where there are other queries than
    keys, documents are those of the keys."""

    offset: float = 0.0

    @property
    def score(self) -> Score:
        return Score(self.causal, self.window, self.soft_cap, self.alibi, self.sinks)

    def layout(self, device: torch.device | str = "cpu") -> Layout:
        """The documents as a call takes them."""
        starts = torch.tensor(self.document_starts(), dtype=torch.int32, device=device)
        return documents(starts) if self.documents else Layout()

    def sink_logits(self, device: torch.device | str = "cpu") -> Tensor | None:
        """(H,) fp32."""
        return torch.linspace(-1.5, 2.0, self.H).to(device) if self.sinks else None

    def visible(self) -> Tensor:
        """(B, T, S) bool."""
        return replace(self, dropout=0.0).problem().seen[:, 0].expand(self.B, -1, -1)

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of out, drawn in fp64 and rounded to `dtype`; the same on every device."""
        (name,) = (name for name, x in checked.DTYPES.items() if x is dtype)
        drawn = checked.draw(replace(self, dtype=name, seed=seed), device)
        if self.offset:
            drawn.q[..., 0] = (abs(self.offset) * self.D**0.5) ** 0.5
            drawn.k[..., 0] = math.copysign((abs(self.offset) * self.D**0.5) ** 0.5, self.offset)
        return drawn.q, drawn.k, drawn.v, drawn.do

    def problem(self, device: torch.device | str = "cpu", sinks: Tensor | None = None) -> Problem:
        """What the reference computes, with the mask of KEY where weights are dropped."""
        q, k = (torch.empty(self.B, 1, n, self.D, device=device) for n in (self.T, self.S))
        made = problem_of(
            q,
            k,
            score=self.score,
            layout=self.layout(device),
            dropout_key=KEY,
            dropout=self.dropout,
            tensors={
                "slopes": torch.tensor(published_slopes(self.H), device=device),
                "sinks": self.sink_logits(device) if sinks is None else sinks,
            },
        )
        return made(slice(0, self.H))


def build(name: str, **options: Any) -> Attention:
    """The implementation of a name, with these options of AttentionConfig."""
    return build_attention(AttentionConfig(name, **options))


def published_slopes(n_heads: int) -> list[float]:
    """The slopes as Press et al. publish them (github.com/ofirpress/attention_with_linear_biases)."""

    def powers(n):
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
    case = case or Case(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal)
    asked = replace(replace(case, dropout=0.0).problem(q.device, sinks), keep=keep, keep_scale=1 / (1 - rate))
    return evaluate(q, k, v, torch.zeros_like(q), asked).results["out"]


def gradients(
    attend: Callable[..., Tensor | AttentionOutput], *tensors: Tensor, **others: Tensor | None
) -> dict[str, Tensor]:
    """out and the gradients of q, k, v and `others`, such as sinks, in fp64, for the tensors q, k, v and dout; and the
    log-sum-exp where it is returned.

    attend  called with q, k and v, and with the others by name
    """
    *inputs, dout = tensors
    named = dict(zip("qkv", inputs, strict=True)) | {name: x for name, x in others.items() if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in named.items()}
    out, lse = attend(*(leaves[x] for x in "qkv"), **{x: leaves[x] for x in leaves if x not in "qkv"}), None
    if isinstance(out, AttentionOutput):
        out, lse = out
    found = {"out": out} | {
        f"d{x}": y for x, y in zip(leaves, torch.autograd.grad(out, [*leaves.values()], dout), strict=True)
    }
    found |= {} if lse is None else {"lse": lse}
    return {name: x.detach().double() for name, x in found.items()}


def results_of(
    attend: Callable[..., AttentionOutput], case: Case, tensors: Sequence[Tensor], **options: Any
) -> dict[str, Tensor]:
    """`gradients` of a case, for the tensors q, k, v and dout."""
    device = tensors[0].device
    options |= {"score": case.score, "layout": case.layout(device), "dropout_key": KEY}

    def run(q, k, v, sinks=None):
        return attend(q, k, v, sinks=sinks, **options)

    return gradients(run, *tensors, sinks=case.sink_logits(device))


def with_part_of_the_mask(
    attend: Callable[..., AttentionOutput], D: int, dtype: torch.dtype, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """out and the gradients of q, k and v, and what they are in fp64, of a part of the heads, queries and keys under
    the mask of the whole. `attend` drops half of the weights."""
    tensors = Case(1, 2, 1, 96, 134, D).tensors(dtype, device)
    keep = keep_mask(KEY, 0.5, 1, 4, 128, 198, device=device)[:, 2:, 32:, 64:]
    key = replace(KEY, first_head=2, first_query=32, first_key=64)
    got = gradients(partial(attend, dropout_key=key), *tensors)
    exact = gradients(partial(formula, keep=keep, rate=0.5), *(x.double() for x in tensors))
    return ((got[name], x) for name, x in exact.items())


def make_loud(q: Tensor, k: Tensor, row: int, loud: str) -> None:
    """The score of a row and key 3 becomes 10,000, because the `loud` one of the two is long."""
    direction = q[:, :, row] / q[:, :, row].square().sum(-1, keepdim=True)
    k[:, :, 3] = (direction * (10 * q.shape[-1] ** 0.5)).to(k)
    large, n = (k, 3) if loud == "key" else (q, row)
    large[:, :, n] *= 1000


def gradients_with_slopes(
    case: Case, config: AttentionConfig, tensors: Sequence[Tensor], slopes: Sequence[float]
) -> dict[str, Tensor]:
    """`gradients` of the implementation that `config` names, for the tensors q, k, v and dout, with ALiBi's slopes."""
    attend = build_attention(replace(config, dropout=case.dropout))
    return results_of(attend, case, tensors, slopes=torch.tensor(slopes, device=tensors[0].device))


def assert_accurate(
    attend: Callable[..., AttentionOutput],
    case: Case,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    lse: bool = False,
) -> None:
    """The check's judge finds nothing but rounding in out, all gradients and, if asked, the log-sum-exp."""
    tensors = case.tensors(dtype, device)
    with interpreting():
        got = results_of(attend, case, tensors, return_lse=lse)
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

    def run(q, k, v, sinks=None):
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

    def run(*tensors):
        return gradients(lambda *qkv: attend(*qkv, score=case.score, layout=layout), *tensors)

    def with_nan(x, tile):
        bad = x.clone()
        bad[:, :, tile] = torch.nan
        return bad

    def assert_equal(name, got, tiles, length):
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
