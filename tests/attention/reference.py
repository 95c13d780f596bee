"""Independent references for attention and its dropout mask, and the accuracy that an implementation is held to.

Nothing here calls the code under test: the formula is written out once more, and the mask comes from the scheme in
attention/dropout/mask.py's docstring, evaluated weight by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attention import AttentionOutput, DropoutKey, Score

KEY = DropoutKey(seed=1337, step=11, layer=3, first_sequence=5)


@dataclass(frozen=True)
class Case:
    """One attention problem: q (B, H, T, D) against k, v (B, H_kv, S, D).

    The scores are about normal, with mean `offset` and standard deviation `spread`.
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

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of out, drawn in fp64 and rounded to `dtype`; the same on every device."""
        generator = torch.Generator().manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            return torch.randn(self.B, heads, length, self.D, generator=generator, dtype=torch.float64)

        q, k = normal(self.H, self.T) * self.spread**0.5, normal(self.H_kv, self.S) * self.spread**0.5
        if self.offset:
            q[..., 0] = k[..., 0] = (self.offset * self.D**0.5) ** 0.5
        return tuple(x.to(dtype).to(device) for x in (q, k, normal(self.H_kv, self.S), normal(self.H, self.T)))


def probabilities(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)), (B, H, T, S), in the precision of q and k; rows that see nothing are zero."""
    (T, D), S = q.shape[2:], k.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q / D**0.5) @ k.transpose(2, 3)  # divided first, so that fp16 holds every score it can
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1) & causal
    blind = hidden.all(dim=1)[:, None]
    return scores.masked_fill(hidden & ~blind, float("-inf")).softmax(dim=-1).masked_fill(blind, 0.0)


def formula(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, keep: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in the precision of its inputs throughout.

    keep   (B, H, T, S) bool, the weights that dropout keeps, and `rate` the probability of dropping that it realises
    """
    p = probabilities(q, k, causal)
    if keep is not None:
        p = p.masked_fill(~keep, 0.0) / (1 - rate)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


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


def gradients(attend: Callable[..., Tensor | AttentionOutput], *tensors: Tensor) -> dict[str, Tensor]:
    """out and the gradients of q, k and v, in fp64, for the tensors q, k, v and dout."""
    *inputs, dout = tensors
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = attend(q, k, v)
    out = out.out if isinstance(out, AttentionOutput) else out
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {name: x.detach().double() for name, x in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items()}


@dataclass(frozen=True)
class Expected:
    """What a case should give: name -> (B, H or H_kv, T or S, D) fp64 for "out", "dq", "dk" and "dv".

    exact   the formula in fp64
    plain   the formula in the case's precision
    slack   name -> error granted besides twice that of `plain`, see `expect`
    """

    exact: dict[str, Tensor]
    plain: dict[str, Tensor]
    slack: dict[str, float]


@lru_cache(maxsize=64)
def expect(case: Case, dtype: torch.dtype, device: str = "cpu") -> Expected:
    """Evaluate the formula for `case.tensors(dtype)` in fp64 and in `dtype`.

    What is granted besides twice the plain formula's error, which is exact by chance where little is to be computed,
    are fp32 roundings: for dq and dk two, of the terms of dS = P (dP - delta). A row that looks at a single key has
    dP = delta, to the plain formula the same number twice, while FlashAttention takes delta from the output. And for
    dv one, of the scores: its probabilities come from a product of q and k of the backward's own, whose sums may be
    taken in another order than the forward's.
    """
    tensors = case.tensors(dtype, device)
    keep, rate = None, 0.0
    if case.dropout > 0:
        keep = reference_mask(KEY, case.dropout, case.B, case.H, case.T, case.S).to(device)
        rate = round(256 * case.dropout) / 256

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return formula(q, k, v, causal=case.causal, keep=keep, rate=rate)

    q, k, v, dout = (x.double() for x in tensors)
    exact, plain = gradients(attend, q, k, v, dout), gradients(attend, *tensors)

    group = case.H // case.H_kv
    p = probabilities(q, k, case.causal)
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
    return Expected(exact, plain, slack)


def assert_accurate(
    attend: Callable[..., AttentionOutput],
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    factor: float = 2.0,
) -> None:
    """Against fp64, out lies within twice the plain formula's own error, and each gradient within `factor` times it.

    One rounding of the largest result to fp32 is granted besides, and the slack of `expect`.
    """
    expected = expect(case, dtype, device)
    got = gradients(
        lambda q, k, v: attend(q, k, v, score=Score(case.causal), dropout_key=KEY), *case.tensors(dtype, device)
    )
    for name, exact in expected.exact.items():
        error = (got[name] - exact).abs().max().item()
        plain_error = (expected.plain[name] - exact).abs().max().item()
        slack = expected.slack[name] + torch.finfo(torch.float32).eps * exact.abs().max().item()
        allowed = 2.0 if name == "out" else factor
        assert error <= allowed * plain_error + slack, (
            f"{name}: error {error:.2e}, the plain formula's {plain_error:.2e} ({case}, {dtype})"
        )
