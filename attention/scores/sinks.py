"""Sinks: a learned logit for each head joins the softmax's sum, so that a row's weights add up to less than 1.

    p = exp(s) / (exp(sink_h) + sum over visible keys of exp(s))

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; gpt-oss. A sink acts like a key without
a value that every query sees, also a query that sees nothing else.
"""

import math

import torch
from torch import Tensor

from ..precision import accum_dtype
from .option import HeadTensor, ScoreOption


class Sinks(ScoreOption):
    """a learned logit for each head joins the softmax's sum"""

    name = "sinks"
    in_kernels = True
    tensor = HeadTensor("sinks", lambda n_heads, device: torch.zeros(n_heads, device=device), learned=True)


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores (B, H, T, S) with the sinks (H,), where there are any, in one more column."""
    if sinks is None:
        return scores
    wide = accum_dtype(scores.dtype)
    return torch.cat([scores.to(wide), sinks.to(wide)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)


def start_with_sinks(m: Tensor, l: Tensor, sinks: Tensor | None) -> None:
    """Begin an online softmax's maximum m and sum l, (B, H_kv, G, rows, 1), with the sinks (H,), in place.

    As if a key without a value had been seen before all others.
    """
    if sinks is not None:
        m.copy_(sinks.view(m.shape[1], -1, 1, 1))
        l.fill_(1.0)


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, H, T, D) and lse (B, H, T) with the sinks (H,), from out and lse without them.

    A sink takes exp(sink) of the softmax's sum, and leaves the rest exp(lse).
    """
    sinks = sinks[:, None]
    return (out * torch.sigmoid(lse - sinks)[..., None]).to(out.dtype), torch.logaddexp(lse, sinks)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks (H,), from lse and delta (B, H_kv, G, T, 1).

    dS = P (dP - delta) with dP = 0, as a sink has no value.
    """
    p_sink = torch.exp(sinks.view(lse.shape[1], -1, 1, 1) - lse)
    return -(p_sink * delta).sum(dim=(0, 3, 4)).flatten().to(sinks.dtype)


def sinks_gradient_of_kernels(sinks: Tensor, lse2: Tensor, delta: Tensor, T: int, threshold: int) -> Tensor:
    """The same from lse2, in base 2, and delta (B, H, T or more), without the scale that dropout gives kept weights."""
    p_sink = torch.exp2(sinks[:, None] * math.log2(math.e) - lse2)
    return (p_sink * delta)[..., :T].sum((0, 2)) * (-256 / (256 - threshold))
