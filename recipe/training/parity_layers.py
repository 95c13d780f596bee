"""Each layer's attention alone, on the run's q, k and v, by the judge of `gpt-attention check`.

The rest of a model rounds too, and hides small errors of an attention, such as a scale that is 0.1 % off in bf16. So
every call of the model is repeated alone, and out, the log-sum-exp and all gradients are compared with fp64 row by row,
beside the same formula in the same precision:

    in training and in evaluation     as the run calls it: with dropout and gradients, or with neither
    in the run's precision            and in fp32, or else fp64, where the attention takes them
    with the run's scores             and, in that higher precision, with steep ones: some branches of an online
                                      softmax are taken only where scores grow by more than a small model's do

The gradient of out is drawn at random, so that no row is spared by a loss that does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from attention import Attention, AttentionError, AttentionOutput, DropoutKey, Layout, Score
from attention.check.calls import problem_of
from attention.check.judge import Verdict, judge
from data.batches import Batch
from model.gpt import GPT

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
# Pairs of a query and a key that are compared in each head, in fp64: more would take longer than training.
PAIRS = {"cpu": 2**16, "cuda": 2**22}
STEEP = 10.0  # standard deviation of scores in the steep calls
TF32_EPS = 2**-10


@dataclass
class Worst:
    """The largest share of the error that is allowed, and where: above 1 it is not rounding."""

    share: float = 0.0
    where: str = ""

    def see(self, verdict: Verdict, where: str) -> None:
        """Count a verdict; NaN counts as infinite."""
        if not verdict.share <= self.share:
            self.share = verdict.share
            self.where = f"{where}: {verdict.name} of {verdict.place()}" if verdict.row else where


@dataclass
class Layers:
    """The results of a check of all layers.

    run     in the run's precision, `higher` in the one named by `precision`; None where nothing was compared
    unseen  what could not be compared, with the reason
    """

    run: Worst | None = None
    higher: Worst | None = None
    precision: str | None = None
    unseen: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """As `parity/attention_*` in metrics.jsonl: no number where nothing was compared."""
        metrics: dict[str, Any] = {}
        if self.run is not None:
            metrics["parity/attention_error"] = self.run.share
        if self.higher is not None:
            metrics["parity/attention_error_higher"] = self.higher.share
            metrics["parity/attention_precision"] = self.precision
        if seen := [worst for worst in (self.run, self.higher) if worst is not None]:
            metrics["parity/attention_worst"] = max(seen, key=lambda worst: worst.share).where
        if self.unseen:
            metrics["parity/attention_unseen"] = "; ".join(f"{what} ({why})" for what, why in self.unseen.items())
        return metrics


def part(B: int, T: int, device: torch.device) -> tuple[int, int]:
    """The sequences and tokens, of B and T, that a check of the layers compares."""
    pairs = PAIRS[device.type]
    T = min(T, math.isqrt(pairs))
    return max(1, min(B, pairs // T**2)), T


def check_layers(model: GPT, batch: Batch, key: DropoutKey | None, dtype: torch.dtype) -> Layers:
    """Judge the attention of every layer of `model` on a micro-batch.

    model  not compiled, in the mode it trains in
    key    of the micro-batch's dropout
    dtype  of the run: half precisions use autocast, as in training
    """
    layers, half, made = Layers(), dtype in (torch.bfloat16, torch.float16), frozenset(model.made_tensors())
    for training in (True, False):
        listener = cast(Attention, Listener(model.attend, training, layers, made))
        with mode(model, training), torch.no_grad(), torch.autocast(batch.inputs.device.type, dtype, enabled=half):
            model.hidden(batch.inputs, key if training else None, listener, batch.document_starts)
    return layers


@contextmanager
def mode(model: GPT, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode."""
    before = model.training
    try:
        model.train(training)
        yield
    finally:
        model.train(before)


class Listener:
    """Stands in for a model's attention: judges each call, then answers it."""

    def __init__(self, attend: Attention, training: bool, layers: Layers, made: frozenset[str]) -> None:
        """made: the names of tensors that layers make from their input, which have a gradient in training."""
        self.attend, self.training, self.layers, self.made, self.layer = attend, training, layers, made, 0
        self.name, self.dropout = attend.name, attend.dropout

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score: Score,
        layout: Layout,
        scale: float | None = None,
        dropout_key: DropoutKey | Tensor | None = None,
        **tensors: Any,
    ) -> AttentionOutput:
        options: dict[str, Any] = {"score": score, "layout": layout, "scale": scale, "dropout_key": dropout_key}
        self.judge(Called(q, k, v, options, tensors))
        self.layer += 1
        return self.attend(q, k, v, **options, **tensors)

    def judge(self, called: Called) -> None:
        """Measure the errors of one layer's attention in all the ways that the module's docstring lists."""
        layers, mode = self.layers, "training" if self.training else "evaluation"
        where = f"layer {self.layer}, {mode}, {NAMES[called.q.dtype]}"
        try:
            of_run = self.verdicts(called)
        except NotImplementedError as error:
            layers.unseen[f"layer {self.layer}"] = str(error)
            return
        layers.run = layers.run or Worst()
        for verdict in of_run:
            layers.run.see(verdict, where)
        higher = torch.float64 if called.q.dtype is torch.float32 else torch.float32
        try:
            precise = called.to(higher)
            verdicts = [(verdict, "") for verdict in self.verdicts(precise)]
            verdicts += [(verdict, ", steep scores") for verdict in self.verdicts(precise.steep())]
        except (AttentionError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            layers.unseen[NAMES[higher]] = str(error)
            return
        layers.higher, layers.precision = layers.higher or Worst(), NAMES[higher]
        for verdict, how in verdicts:
            layers.higher.see(verdict, f"layer {self.layer}, {mode}, {NAMES[higher]}{how}")

    def verdicts(self, called: Called) -> list[Verdict]:
        """The judgement of a call, with gradients in training."""
        q, k, v = called.q.detach(), called.k.detach(), called.v.detach()
        tensors: dict[str, Any] = {
            name: x.detach() if isinstance(x, Tensor) else x for name, x in called.tensors.items()
        }
        leaves = {"dq": q, "dk": k, "dv": v}
        of_heads = [x.name for x in called.options["score"].head_tensors]
        leaves |= {
            f"d{name}" if name in of_heads else f"d({name})": tensors[name]
            for name, x in called.tensors.items()
            if name in self.made or (isinstance(x, Tensor) and x.requires_grad)
        }
        problem = problem_of(q, k, **called.options, dropout=self.dropout, tensors=tensors)
        got: dict[str, Tensor | None] = {}
        do = called.gradient_of_out(self.layer)
        with torch.set_grad_enabled(self.training):
            for leaf in leaves.values():
                leaf.requires_grad_(self.training)
            try:
                out, lse = self.attend(q, k, v, **called.options, **tensors, return_lse=True)
                got["lse"] = lse
            except AttentionError:
                self.layers.unseen["the log-sum-exp"] = "it is not returned"
                out = self.attend(q, k, v, **called.options, **tensors).out
            got["out"] = out.detach()
            if self.training:
                with torch.autocast(q.device.type, enabled=False):  # training's backward pass is outside it too
                    gradients = torch.autograd.grad(out, list(leaves.values()), do, allow_unused=True)
                got |= dict(zip(leaves, gradients, strict=True))
        tf32 = q.dtype is torch.float32 and self.attend.config.allow_tf32
        return judge(q.detach(), k.detach(), v.detach(), do, problem, got, TF32_EPS if tf32 else None)


@dataclass(frozen=True)
class Called:
    """A layer's call: q (B, H, T, D), k, v (B, H_kv, S, D), and the other arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    tensors: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Called:
        """The same in another precision."""
        return Called(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.options, self.tensors)

    def steep(self) -> Called:
        """The same with queries so large that the scores' standard deviation is about STEEP."""
        D, scale = self.q.shape[-1], self.options["scale"]
        scale = 1 / math.sqrt(D) if scale is None else abs(scale)
        spread = scale * math.sqrt(D) * self.q.square().mean().sqrt() * self.k.square().mean().sqrt()
        return Called(self.q * (STEEP / spread.clamp(min=1e-6)), self.k, self.v, self.options, self.tensors)

    def gradient_of_out(self, layer: int) -> Tensor:
        """(B, H, T, D), normal numbers that are the same in every probe."""
        generator = torch.Generator(self.q.device).manual_seed(layer)
        do = torch.randn(self.q.shape, generator=generator, device=self.q.device)
        return do.to(self.q.dtype)
