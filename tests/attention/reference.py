"""Independent references for attention and its dropout mask, and the accuracy that an implementation is held to.

Nothing here calls the code under test: the formula is written out once more, and the mask comes from the scheme in
attention/dropout/mask.py's docstring, evaluated weight by weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention import AttentionConfig, AttentionOutput, DropoutKey, Layout, Score, build_attention

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
            q[..., 0] = k[..., 0] = (self.offset * self.D**0.5) ** 0.5
        return tuple(x.to(dtype).to(device) for x in (q, k, normal(self.H_kv, self.S), normal(self.H, self.T)))


def changed_scores(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """q k^T / sqrt(D), (B, H, T, S), changed by the options of the case, before keys are hidden.

    In the precision of q and k, but for soft cap, ALiBi and sinks, which are fp32's or better.
    """
    (H, T, D), S = q.shape[1:], k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    scores = (q / D**0.5) @ k.transpose(2, 3)  # divided first, so that fp16 holds every score it can
    if case.soft_cap is not None or case.alibi or case.sinks:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if case.soft_cap is not None:
        scores = case.soft_cap * (scores / case.soft_cap).tanh()
    if case.alibi:
        distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
        slopes = torch.tensor(published_slopes(H), dtype=scores.dtype)
        scores = scores - (slopes[:, None, None] * distance).to(q.device)
    return scores


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The scores (B, H, T, S), and the sinks (H,) in a column after them where they are given."""
    if sinks is None:
        return scores
    return torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)


def probabilities(q: Tensor, k: Tensor, case: Case, sinks: Tensor | None = None) -> Tensor:
    """The softmax of `changed_scores`, (B, H, T, S); rows that see nothing are zero."""
    hidden = ~case.visible()[:, None].to(q.device)
    fully_masked = hidden.all(dim=-1, keepdim=True)
    scores = changed_scores(q, k, case).masked_fill(hidden & ~fully_masked, float("-inf"))
    return with_sinks(scores, sinks).softmax(dim=-1)[..., : k.shape[2]].masked_fill(fully_masked, 0.0)


def log_sum_exp(q: Tensor, k: Tensor, case: Case, sinks: Tensor | None = None) -> Tensor:
    """The log of that softmax's sum, (B, H, T): of the sink alone, or -inf, for rows that see nothing."""
    scores = changed_scores(q, k, case).masked_fill(~case.visible()[:, None].to(q.device), float("-inf"))
    return with_sinks(scores, sinks).logsumexp(dim=-1)


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
    """softmax(q k^T / sqrt(D)) v in the precision of its inputs throughout.

    case   the options of attention where there are more than `causal`
    keep   (B, H, T, S) bool, the weights that dropout keeps, and `rate` the probability of dropping that it realises
    """
    case = case or Case(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal=causal)
    p = probabilities(q, k, case, sinks)
    if keep is not None:
        p = p.masked_fill(~keep, 0.0) / (1 - rate)
    return p.to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def philox_words(counter: Sequence, key: Sequence, rounds: int = 7) -> tuple:
    """Philox 4x32 as Salmon et al. write it, on numpy uint64 arrays or scalars below 2**32."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, dtype=np.uint64) for k in key)
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(rounds):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> high) ^ c1 ^ k0, b & low, (a >> high) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@lru_cache(maxsize=8)
def reference_mask(key: DropoutKey, p: float, B: int, H: int, T: int, S: int) -> Tensor:
    """The mask of attention/dropout/mask.py's docstring, one Philox call for every single weight: (B, H, T, S) bool."""
    b, h, i, j = np.meshgrid(*(np.arange(n) for n in (B, H, T, S)), indexing="ij", sparse=True)
    words = philox_words(
        (key.first_sequence + b, (j >> 6) * 8 + (j & 7), key.layer << 16 | h, (i >> 4) * 8 + (i & 7)),
        (key.seed, key.step),
    )
    word = np.choose((j >> 4) & 3, np.broadcast_arrays(*words, np.zeros((B, H, T, S), np.uint64))[:4])
    byte = 3 - (2 * (i >> 3 & 1) + (j >> 3 & 1))
    return torch.from_numpy(word >> (8 * byte).astype(np.uint64) & np.uint64(255) >= round(256 * p))


def gradients(
    attend: Callable[..., Tensor | AttentionOutput], *tensors: Tensor, sinks: Tensor | None = None
) -> dict[str, Tensor]:
    """out and the gradients of q, k, v and, where they are given, the sinks, in fp64, for the tensors q, k, v and dout.

    attend  called with q, k and v, and with the sinks after them
    """
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if sinks is None else [sinks]))]
    out = attend(*leaves)
    out = out.out if isinstance(out, AttentionOutput) else out
    found = {"out": out} | dict(zip(("dq", "dk", "dv", "dsinks"), torch.autograd.grad(out, leaves, dout), strict=False))
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


@dataclass(frozen=True)
class Expected:
    """Expected results: name -> (B, H or H_kv, T or S, D) fp64 for "out", "dq", "dk", "dv", (H,) for "dsinks".

    exact   the formula in fp64
    plain   the formula in the case's precision
    slack   name -> error allowed in addition to twice that of `plain`, see `expect`
    """

    exact: dict[str, Tensor]
    plain: dict[str, Tensor]
    slack: dict[str, float] = field(default_factory=dict)


@lru_cache(maxsize=64)
def expect(case: Case, dtype: torch.dtype, device: str = "cpu") -> Expected:
    """Evaluate the formula for `case.tensors(dtype)` in fp64 and in `dtype`.

    Where little is computed, the plain formula is exact by chance. So roundings are allowed in addition to twice its
    error:

    dq, dk   two fp32 roundings of the terms of dS = P (dP - delta). A row that sees a single key has dP = delta: to the
             plain formula they are the same number, while FlashAttention takes delta from the output.
    dv       one fp32 rounding of the scores: the backward recomputes q k^T, and may add in another order.
    dsinks   three standard deviations of the sum over all rows of delta's error, whose terms are independent roundings
             of the output to `dtype`.
    """
    tensors = case.tensors(dtype, device)
    keep, rate = None, 0.0
    if case.dropout > 0:
        keep = reference_mask(KEY, case.dropout, case.B, case.H, case.T, case.S).to(device)
        rate = round(256 * case.dropout) / 256

    attend, sinks = partial(formula, case=case, keep=keep, rate=rate), case.sink_logits(device)
    q, k, v, dout = (x.double() for x in tensors)
    exact = gradients(attend, q, k, v, dout, sinks=None if sinks is None else sinks.double())
    plain = gradients(attend, *tensors, sinks=sinks)

    group = case.H // case.H_kv
    p = probabilities(q, k, case, sinks)
    dp = dout @ v.repeat_interleave(group, dim=1).mT
    if keep is not None:
        dp = dp.masked_fill(~keep, 0.0) / (1 - rate)
    terms = p * (dp.abs() + (p * dp).sum(-1, keepdim=True).abs()) / case.D**0.5
    terms_dq = terms @ k.repeat_interleave(group, dim=1).abs()
    terms_dk = (terms.mT @ q.abs()).unflatten(1, (case.H_kv, group)).sum(2)

    slack = dict.fromkeys(exact, 0.0)
    scores = (q @ k.repeat_interleave(group, dim=1).mT).abs().max() / case.D**0.5
    terms_dv = scores * (p.mT @ dout.abs()).unflatten(1, (case.H_kv, group)).sum(2)
    slack["dv"] += torch.finfo(torch.float32).eps * terms_dv.max().item()
    for name, x in {"dq": terms_dq, "dk": terms_dk}.items():
        slack[name] += 2 * torch.finfo(torch.float32).eps * x.max().item()
    if case.sinks:
        terms_dsinks = (1 - p.sum(-1, keepdim=True)) * dout * exact["out"]  # (B, H, T, D)
        deviation = torch.finfo(dtype).eps / 2 / 3**0.5 * terms_dsinks.square().sum(dim=(0, 2, 3)).sqrt()
        slack["dsinks"] += 3 * deviation.max().item()
    return Expected(exact, plain, slack)


def assert_accurate(
    attend: Callable[..., AttentionOutput],
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    factor: float = 2.0,
) -> None:
    """Against fp64, out lies within twice the plain formula's own error, and each gradient within `factor` times it.

    One fp32 rounding of the largest result is allowed in addition, and the slack of `expect`.
    """
    expected = expect(case, dtype, device)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> AttentionOutput:
        return attend(q, k, v, score=case.score, layout=case.layout(device), sinks=sinks, dropout_key=KEY)

    got = gradients(run, *case.tensors(dtype, device), sinks=case.sink_logits(device))
    assert_as_accurate(got, expected, factor, f"{case}, {dtype}")


def assert_as_accurate(got: dict[str, Tensor], expected: Expected, factor: float, of: str) -> None:
    """As `assert_accurate`, for computed results. `of` describes them in the message."""
    for name, exact in expected.exact.items():
        error = (got[name] - exact).abs().max().item()
        plain_error = (expected.plain[name] - exact).abs().max().item()
        slack = expected.slack.get(name, 0.0) + torch.finfo(torch.float32).eps * exact.abs().max().item()
        allowed = 2.0 if name == "out" else factor
        assert error <= allowed * plain_error + slack, (
            f"{name}: error {error:.2e}, the plain formula's {plain_error:.2e} ({of})"
        )


def assert_each_field_of_the_key_changes_the_mask(
    attend: Callable[..., AttentionOutput], q: Tensor, k: Tensor, v: Tensor
) -> None:
    """For an attention that drops half of the weights, and tensors of two sequences or more."""
    outs = [
        attend(q, k, v, dropout_key=key).out
        for key in (DropoutKey(1, 1, 1, 1), DropoutKey(2, 1, 1, 1), DropoutKey(1, 2, 1, 1), DropoutKey(1, 1, 2, 1))
    ]
    assert all(not torch.equal(outs[0], other) for other in outs[1:])
    later = attend(q[1:], k[1:], v[1:], dropout_key=DropoutKey(1, 1, 1, 2)).out
    assert torch.equal(later, outs[0][1:]), "a sequence's mask depends on its place in the global batch alone"


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
