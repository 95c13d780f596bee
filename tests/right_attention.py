"""Correct attention in many ways, none of which a check may accuse. RIGHT has ten of them by name."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from attention import Attention, AttentionConfig, SDPABackend
from tests.attention_in_steps import InSteps, Steps, dot

LOG2_E = math.log2(math.e)


class BackwardSteps(Steps):
    """The keys in reverse order."""

    def positions(self):
        i, j = super().positions()
        return i, j.flip(0)

    def keep(self, backward):
        keep = super().keep(backward)
        return keep if keep is None else keep.flip(-1)


class KeysBackwards(InSteps):
    """Another order of sums."""

    name, steps = "keys_backwards", BackwardSteps

    def __call__(self, q, k, v, **options):
        return super().__call__(q, k.flip(2), v.flip(2), **options)


class BaseTwoSteps(Steps):
    """Exponentials to base 2 of scores that were scaled for it, as kernels compute them."""

    def raw(self, q, k):
        return dot(q, self.expand(k).mT) * (self.factor() * LOG2_E) / LOG2_E

    def weights(self, s, lse):
        lse = lse.masked_fill(lse == -torch.inf, 0.0) * LOG2_E
        p = torch.exp2(s * LOG2_E - lse.unsqueeze(-1))
        return p.masked_fill(~self.seen(False).any(dim=-1, keepdim=True), 0.0)


class SplitSteps(Steps):
    """The keys in two parts, joined by their log-sum-exp, as in decoding."""

    def softmax(self, s):
        s = pad(s, (0, 1), value=-torch.inf)
        parts = [part.logsumexp(dim=-1) for part in s.tensor_split(2, dim=-1)]
        if self.score.sinks:
            parts.append(self.sinks.to(s.dtype)[:, None].expand_as(parts[0]))
        lse = torch.stack(parts).logsumexp(dim=0)
        return self.weights(s[..., :-1], lse), lse

    def weigh(self, p, v):
        halves = zip(p.tensor_split(2, dim=-1), self.expand(v).tensor_split(2, dim=2), strict=True)
        first, second = (dot(p.to(v.dtype), v) for p, v in halves)
        return first + second


class WideSteps(Steps):
    """Everything in fp64, rounded once at the end."""

    def raw(self, q, k):
        return super().raw(q.double(), k.double())

    def weigh(self, p, v):
        return p @ self.expand(v.double())

    def rounded(self, ds, dtype):
        return ds

    def log_sum(self, lse):
        return lse.float()


def attention(name: str, steps: type[Steps]) -> type[Attention]:
    """The class of an attention with some steps."""
    return type(steps.__name__.replace("Steps", "Attention"), (InSteps,), {"name": name, "steps": steps})


CLASSES: tuple[type[Attention], ...] = (
    InSteps,
    KeysBackwards,
    attention("base_two", BaseTwoSteps),
    attention("split_keys", SplitSteps),
    attention("wide", WideSteps),
)
# Lines of the check that fail, and are right: torch adds -inf to the scores of hidden keys, and NaN stays NaN.
ALLOWED = {"sdpa": frozenset({"NaN and infinity"})}
RIGHT = {
    "naive": AttentionConfig("naive"),
    "tiled": AttentionConfig("tiled"),
    "tiled in small tiles": AttentionConfig("tiled", block_q=16, block_k=16),
    "tiled in odd tiles": AttentionConfig("tiled", block_q=24, block_k=40),
    "sdpa": AttentionConfig("sdpa", backend=SDPABackend.math),
    **{cls.name: AttentionConfig(cls.name) for cls in CLASSES},
}
