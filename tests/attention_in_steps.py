"""Attention forward and backward in steps, of which tests replace one: see tests/wrong_attention."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention import AttentionOutput, DropoutKey, Layout, Score, keep_mask
from attention.naive import NaiveAttention

TILE = 32  # keys that an online softmax would see at a time


class Steps:
    """A call, in the steps of FlashAttention-2 with all scores in memory. Sums are fp32's, or fp64's.

    differentiated  whether gradients will be asked for
    needs           of q, k, v and the sinks, in the backward pass: which need a gradient
    """

    needs: tuple[bool, ...] = ()

    def __init__(self, q: Tensor, k: Tensor, options: dict[str, Any], rate: float, differentiated: bool) -> None:
        self.score: Score = options["score"]
        self.layout: Layout = options["layout"]
        self.scale: float = options["scale"] or q.shape[-1] ** -0.5
        key = options["dropout_key"] if rate else None
        self.key = DropoutKey(*key.tolist()) if isinstance(key, Tensor) else key
        self.slopes, self.sinks = options["slopes"], options["sinks"]
        self.rate, self.differentiated = rate, differentiated
        (self.B, self.H, self.T, _), self.S = q.shape, k.shape[2]

    def factor(self) -> float:
        return self.scale

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def expand(self, x: Tensor) -> Tensor:
        """Keys or values of each query head."""
        return x.repeat_interleave(self.H // x.shape[1], dim=1)

    def reduce(self, x: Tensor, H_kv: int) -> Tensor:
        """Gradients of keys or values, of each key/value head."""
        return x.unflatten(1, (H_kv, -1)).sum(dim=2)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Of queries (T, 1) and keys (S,)."""
        q_start = self.layout.q_start
        first = self.layout.k_start + self.S - self.T if q_start is None else q_start
        return torch.arange(first, first + self.T)[:, None], torch.arange(self.S) + self.layout.k_start

    def window(self, backward: bool) -> int | None:
        return self.score.window

    def starts(self) -> Tensor | None:
        """(B, S) of documents."""
        return self.layout.document_starts

    def seen(self, backward: bool) -> Tensor:
        """(B or 1, 1, T, S) bool."""
        i, j = self.positions()
        seen = torch.ones(1, 1, self.T, self.S, dtype=torch.bool)
        if self.score.causal:
            seen = seen & (j <= i)
        window, starts = self.window(backward), self.starts()
        if window is not None:
            seen = seen & (i - j < window)
        if starts is not None:
            known = (i[:, 0] >= 0) & (i[:, 0] < starts.shape[1])
            same = starts[:, i[:, 0].clamp(0, starts.shape[1] - 1)][:, :, None] == starts[:, None, j]
            seen = seen & (same & known[:, None]).unsqueeze(1)
        return seen

    def raw(self, q: Tensor, k: Tensor) -> Tensor:
        return self.factor() * dot(q, self.expand(k).mT)

    def changed(self, raw: Tensor) -> Tensor:
        s, cap = raw, self.score.soft_cap
        if cap is not None:
            s = cap * torch.tanh(s / cap)
        return s - self.bias().to(s.dtype) if self.score.alibi else s

    def bias(self) -> Tensor:
        """ALiBi's, (H, T, S)."""
        i, j = self.positions()
        return self.slopes[:, None, None] * (i - j)

    def slope(self, raw: Tensor) -> Tensor:
        """The derivative of the soft cap."""
        cap = self.score.soft_cap
        return torch.ones_like(raw) if cap is None else 1 - torch.tanh(raw / cap) ** 2

    def hidden(self, s: Tensor, backward: bool) -> Tensor:
        """The scores, -inf where nothing is seen."""
        return s.masked_fill(~self.seen(backward), -torch.inf)

    def softmax(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the log of the sum of exponentials (B, H, T)."""
        joined = s
        if self.score.sinks:
            joined = torch.cat([s, self.sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
        lse = joined.logsumexp(dim=-1)
        return self.weights(s, lse), lse

    def weights(self, s: Tensor, lse: Tensor) -> Tensor:
        """exp(s - lse), zero for rows that see nothing."""
        p = torch.exp(s - lse.unsqueeze(-1).masked_fill(lse.unsqueeze(-1) == -torch.inf, 0.0))
        return p.masked_fill(~self.seen(False).any(dim=-1, keepdim=True), 0.0)

    def keep(self, backward: bool) -> Tensor | None:
        """The weights that dropout keeps."""
        return None if self.key is None else keep_mask(self.key, self.rate, self.B, self.H, self.T, self.S)

    def keep_factor(self) -> float:
        return 256 / (256 - round(256 * self.rate))

    def drop(self, x: Tensor, backward: bool) -> Tensor:
        keep = self.keep(backward)
        return x if keep is None else torch.where(keep, x * self.keep_factor(), 0.0)

    def weigh(self, p: Tensor, v: Tensor) -> Tensor:
        return dot(p.to(v.dtype), self.expand(v))

    def finish(self, out: Tensor) -> Tensor:
        return out

    def log_sum(self, lse: Tensor) -> Tensor:
        """What is returned as the log-sum-exp."""
        return lse

    def delta(self, do: Tensor, out: Tensor, p: Tensor, dp: Tensor) -> Tensor:
        """(B, H, T, 1)."""
        return (do.to(p.dtype) * out.to(p.dtype)).sum(dim=-1, keepdim=True)

    def rounded(self, ds: Tensor, dtype: torch.dtype) -> Tensor:
        """The scores' gradient as an operand of products."""
        return ds.to(dtype)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, dsinks: Tensor) -> tuple[Tensor, ...]:
        return dq, dk, dv, dsinks


class Run(torch.autograd.Function):
    """The steps in their order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, steps: Steps) -> tuple[Tensor, Tensor]:
        ctx.steps = steps
        read = steps.inputs(q, k, v)
        p, lse = steps.softmax(steps.hidden(steps.changed(steps.raw(read[0], read[1])), backward=False))
        out = steps.finish(steps.weigh(steps.drop(p, backward=False), read[2])).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        returned = steps.log_sum(lse)
        ctx.mark_non_differentiable(returned)
        return out, returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse), steps = ctx.saved_tensors, ctx.steps
        steps.needs = ctx.needs_input_grad
        H_kv, raw = k.shape[1], steps.raw(q, k)
        p = steps.weights(steps.hidden(steps.changed(raw), backward=True), lse)
        dp = steps.drop(dot(do, steps.expand(v).mT), backward=True)
        delta = steps.delta(do, out, p, dp)
        ds = steps.rounded(p * (dp - delta) * steps.slope(raw), q.dtype)
        dsinks = p.new_zeros(steps.H)
        if steps.score.sinks:
            finite = lse.masked_fill(lse == -torch.inf, 0.0)
            dsinks = -(torch.exp(steps.sinks[:, None] - finite) * delta.squeeze(-1)).sum(dim=(0, 2))
        dq = steps.factor() * dot(ds, steps.expand(k))
        dk = steps.reduce(steps.factor() * dot(ds.mT, q), H_kv)
        dv = steps.reduce(dot(steps.drop(p, backward=True).to(v.dtype).mT, do), H_kv)
        dq, dk, dv, dsinks = steps.gradients(dq, dk, dv, dsinks)
        given = dsinks.to(steps.sinks.dtype) if steps.score.sinks else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), given, None


class InSteps(NaiveAttention):
    """An attention that computes in `steps`."""

    name = "in_steps"
    steps: ClassVar[type[Steps]] = Steps

    def __call__(
        self,
        q,
        k,
        v,
        *,
        score=Score(),  # noqa: B008
        layout=Layout(),  # noqa: B008
        scale=None,
        dropout_key=None,
        return_lse=False,
        **tensors,
    ):
        options = {"score": score, "layout": layout, "scale": scale, "dropout_key": dropout_key}
        sinks = tensors.get("sinks")
        options |= {"slopes": tensors.get("slopes"), "sinks": None if sinks is None else sinks.detach()}
        differentiated = torch.is_grad_enabled() and q.requires_grad
        steps = self.steps(q, k, options, self.dropout, differentiated)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = Run.apply(q, k, v, sinks, steps)
        return AttentionOutput(out, lse.detach() if return_lse else None)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """A product with sums in fp32, or in fp64."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
