"""Each layer's attention alone, on the run's q, k and v: calls of its own, which `watch` judges.

The rest of a model rounds too, and hides small errors of an attention, such as a scale that is 0.1 % off in bf16. So
every call of the model is repeated alone, and out, the log-sum-exp and all gradients are compared with fp64 row by row,
beside the same formula in the same precision:

    in training and in evaluation     as the run calls it: with dropout and gradients, or with neither
    in the run's precision            and in fp32, or else fp64, where the attention takes them
    with the run's scores             and, in that higher precision, with steep ones: some branches of an online
                                      softmax are taken only where scores grow by more than a small model's do

The gradient of out is drawn at random, so that no row is spared by a loss that does not depend on it.
"""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from attention import Attention, AttentionError, AttentionOutput, DropoutKey, Layout, Score
from attention.check.calls import problem_of, results_of
from attention.check.cases import DTYPES
from attention.watch import Line, Taken
from data.batches import Batch
from model.gpt import GPT

NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Pairs of a query and a key that are compared in each head, in fp64: more would take longer than training.
PAIRS = {"cpu": 2**16, "cuda": 2**22}
STEEP = 10.0  # standard deviation of scores in the steep calls
Inputs = tuple[Tensor, Tensor, Tensor]  # q (B, H, T, D) and k, v (B, H_kv, S, D)


def part(B: int, T: int, device: torch.device) -> tuple[int, int]:
    """The sequences and tokens, of B and T, that a check of the layers compares."""
    pairs = PAIRS[device.type]
    T = min(T, math.isqrt(pairs))
    return max(1, min(B, pairs // T**2)), T


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which rounding in `dtype` is measured."""
    return torch.float64 if dtype is torch.float32 else torch.float32


def check_layers(model: GPT, batch: Batch, key: DropoutKey | None, dtype: torch.dtype) -> dict[str, Any]:
    """Judge the attention of every layer of `model` on a micro-batch.

    model  not compiled, in the mode it trains in
    key    of the micro-batch's dropout
    dtype  of the run: half precisions use autocast, as in training

    Returns `parity/attention_*` as docs/probe.md lists them: no number where nothing was compared.
    """
    made, found, before = frozenset(model.made_tensors()), Found(), model.training
    try:
        for training in (True, False):
            listener = cast(Attention, Listener(model.attend, training, found, made))
            model.train(training)
            with torch.no_grad(), torch.autocast(batch.inputs.device.type, dtype, enabled=dtype.itemsize == 2):
                model.hidden(batch.inputs, key if training else None, listener, batch.document_starts)
    finally:
        model.train(before)
    return found.metrics()


@dataclass
class Found:
    """What `watch` says of the calls, and what was not compared, with the reason.

    lines      of the run's precision, and of a higher one
    precision  the name of the higher one
    """

    lines: dict[str, list[Line]] = field(default_factory=lambda: {"error": [], "error_higher": []})
    precision: str = ""
    unseen: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, Any]:
        """As `check_layers` returns them."""
        metrics: dict[str, Any] = {}
        worst = []
        for name, lines in self.lines.items():
            if judged := [line for line in lines if "watch/error" in line]:
                worst.append(max(judged, key=share))
                metrics[f"parity/attention_{name}"] = share(worst[-1])
            self.unseen |= {x["watch/layer"]: x["watch/not_judged"] for x in lines if "watch/not_judged" in x}
        if "parity/attention_error_higher" in metrics:
            metrics["parity/attention_precision"] = self.precision
        if worst:
            first = max(worst, key=share)
            metrics["parity/attention_worst"] = f"{first['watch/layer']}: {first['watch/worst']}"
        if self.unseen:
            metrics["parity/attention_unseen"] = "; ".join(f"{what} ({why})" for what, why in self.unseen.items())
        return metrics


def share(line: Line) -> float:
    """The largest error as a share of the allowed one: above 1 it is not rounding."""
    return line["watch/error"]


class Listener:
    """Stands in for a model's attention: judges each call, then answers it."""

    def __init__(self, attend: Attention, training: bool, found: Found, made: frozenset[str]) -> None:
        """made: the names of tensors that layers make from their input, which have a gradient in training."""
        self.attend, self.training, self.found, self.made, self.layer = attend, training, found, made, 0
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
        self.judge((q, k, v), options, tensors)
        self.layer += 1
        return self.attend(q, k, v, **options, **tensors)

    def judge(self, inputs: Inputs, options: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Measure the errors of one layer's attention in all the ways that the module's docstring lists.

        options, tensors  the call's other arguments
        """
        found, where = self.found, f"layer {self.layer}, {'training' if self.training else 'evaluation'}"
        try:
            found.lines["error"].append(self.line(inputs, options, tensors, where))
        except NotImplementedError as error:
            found.unseen[f"layer {self.layer}"] = str(error)
            return
        higher = exact_dtype(inputs[0].dtype)
        try:
            q, k, v = (x.to(higher) for x in inputs)
            lines = [
                self.line((q, k, v), options, tensors, where),
                self.line((steepened(q, k, options["scale"]), k, v), options, tensors, where, ", steep scores"),
            ]
        except (AttentionError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            found.unseen[NAMES[higher]] = str(error)
            return
        found.precision = NAMES[higher]
        found.lines["error_higher"] += lines

    def line(self, inputs: Inputs, options: dict[str, Any], tensors: dict[str, Any], where: str, how: str = "") -> Line:
        """What `watch` says of a call, with gradients in training."""
        q, k, v = (x.detach() for x in inputs)
        plain: dict[str, Any] = {name: x.detach() if isinstance(x, Tensor) else x for name, x in tensors.items()}
        leaves = {"dq": q, "dk": k, "dv": v}
        of_heads = [x.name for x in options["score"].head_tensors]
        leaves |= {
            f"d{name}" if name in of_heads else f"d({name})": plain[name]
            for name, x in tensors.items()
            if name in self.made or (isinstance(x, Tensor) and x.requires_grad)
        }
        problem = problem_of(q, k, **options, dropout=self.dropout, tensors=plain)

        def call() -> AttentionOutput:
            try:
                return self.attend(q, k, v, **options, **plain, return_lse=True)
            except AttentionError:
                self.found.unseen["the log-sum-exp"] = "it is not returned"
                return self.attend(q, k, v, **options, **plain)

        generator = torch.Generator(q.device).manual_seed(self.layer)  # the same numbers in every probe
        do = torch.randn(q.shape, generator=generator, device=q.device).to(q.dtype)
        results = results_of(call, leaves if self.training else {}, do)
        values = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "do": do}
        values |= {x: torch.full_like(leaves[x], math.nan) if y is None else y for x, y in results.items()}
        taken = Taken(f"{where}, {NAMES[q.dtype]}{how}", values, slice(0, len(q)), slice(0, k.shape[1]), problem)
        taken.needs, taken.tf32 = [name for name in results if name != "out"], self.attend.config.allow_tf32
        return taken.line(step=0)


def steepened(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """Queries so large that the scores' standard deviation is about STEEP."""
    D = q.shape[-1]
    scale = 1 / math.sqrt(D) if scale is None else abs(scale)
    spread = scale * math.sqrt(D) * q.square().mean().sqrt() * k.square().mean().sqrt()
    return q * (STEEP / spread.clamp(min=1e-6))
