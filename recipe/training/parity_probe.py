"""The probe compares a run's attention with another one during the run.

A training micro-batch goes forward and backward three more times, at the current weights:

    run        the run's attention, in the run's precision, uncompiled
    reference  another attention, in the same precision
    exact      the reference in a higher precision: fp32 for bf16 and fp16, fp64 for fp32

with the dropout masks of the training step. `run - reference` is the effect of the choice of attention;
`reference - exact` is the effect of rounding alone, the floor below which a difference means nothing. Two correct
implementations are about equally far from `exact`, so they differ by a small multiple of the floor at most.

The floor includes the rounding of the whole model. Each layer's attention is therefore also called alone, and compared
with fp64 row by row (parity_layers.py).

The probe changes no weight, gradient or random-number generator.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import (
    IMPLEMENTATIONS,
    Attention,
    AttentionConfig,
    AttentionError,
    AttentionShape,
    DropoutKey,
    DropoutRng,
    build_attention,
)
from attention.check.judge import full_precision_products
from attention.precision import accum_dtype
from data.batches import Batch
from model.gpt import GPT
from model.loss import IGNORE_INDEX
from recipe.errors import UserError, sentence_of
from recipe.training.device import free_memory
from recipe.training.parity import beyond_rounding, rank, wrong_alone
from recipe.training.parity_layers import check_layers, exact_dtype, part

log = logging.getLogger(__name__)
R = TypeVar("R")

# A probe takes at most this fraction of the memory that is free when it starts.
MEMORY_SHARE = 0.8


@dataclass
class ParityConfig:
    """The options under `parity.*`.

    every      updates between two probes; 0: no probe
    reference  the attention to compare with
    """

    every: int = 0
    reference: str = "naive"


def check_parity(config: ParityConfig, attention: AttentionConfig, shape: AttentionShape) -> None:
    """Raise UserError where the run's attention computes another function, or where the reference cannot draw the
    run's dropout masks, or does not support the model in the run's precision or in the higher one."""
    if config.every < 0:
        raise UserError(f"parity.every={config.every} must be a number of steps, or 0 for no probe.")
    if config.reference not in IMPLEMENTATIONS:
        raise UserError(
            f"parity.reference={config.reference} is not known; choose one of {', '.join(IMPLEMENTATIONS)}."
        )
    if config.every == 0:
        return
    if not shape.scores:
        raise UserError("parity.every compares attentions, and model.layers has none; set parity.every=0.")
    if not build_attention(attention).exact:
        raise UserError(
            f"parity.every={config.every} would compare attention={attention.name} with softmax attention, which it "
            "does not claim to be (docs/add-an-attention.md); leave it at 0: compare.py ranks it by loss, and "
            "gpt-attention check judges it."
        )
    if attention.dropout > 0 and attention.rng is DropoutRng.torch:
        raise UserError(
            "parity.every with attention.rng=torch would compare different dropout masks; "
            "set attention.rng=replay, attention.dropout=0 or parity.every=0."
        )
    try:
        reference = build_reference(config, attention)
        for dtype in (shape.dtype, exact_dtype(shape.dtype)):
            reference.check(replace(shape, dtype=dtype))
    except AttentionError as error:
        raise UserError(
            f"parity.reference={config.reference} cannot stand beside this run: {sentence_of(error)}"
        ) from error


def build_reference(config: ParityConfig, attention: AttentionConfig) -> Attention:
    """The attention to compare with: `config.reference`, with the run's dropout."""
    return build_attention(AttentionConfig(name=config.reference, dropout=attention.dropout))


class ParityProbe:
    """Compares a run's attention with a reference on the run's weights and batches."""

    def __init__(self, config: ParityConfig, attention: AttentionConfig, shape: AttentionShape) -> None:
        """
        config     as `check_parity` accepts it
        attention  the run's
        shape      the model's requirements for its attention; its dtype is the precision of the run
        """
        self.config, self.shape = config, shape
        self.exact_dtype, self.reference = exact_dtype(shape.dtype), build_reference(config, attention)
        self.window: tuple[int, int] | None = None  # the largest (sequences, tokens) that fits, known after a failure

    def is_due(self, step: int) -> bool:
        """Whether to probe update `step`, counted from 0."""
        return self.config.every > 0 and step % self.config.every == 0

    def measure(self, model: GPT, batch: Batch, key: DropoutKey | None, loss_scale: float = 1.0) -> dict[str, Any]:
        """Compare on one micro-batch.

        model       not compiled, in the mode it trains in
        key         of the micro-batch's dropout
        loss_scale  multiplies the loss before the backward pass (fp16), and is divided out again

        Returns `parity/*` as docs/probe.md lists them. If three passes do not fit in memory, it compares fewer
        sequences or fewer tokens, logs that, and reports the size in parity/tokens.
        """
        (B, T), device = batch.inputs.shape, batch.inputs.device
        planned = self.window or self._planned(model, B, T)
        measured, window = fitting(
            device, *planned, lambda b, t: self._compare(model, batch.beginning(b, t), key, loss_scale)
        )
        if window != (self.window or (B, T)):
            log.warning(
                f"parity: attention={self.config.reference} on {B} sequences of {T} tokens does not fit in "
                f"memory; comparing {window[0]} of {window[1]}."
            )
            self.window = window
        if difference := beyond_rounding(measured):
            log.warning(f"parity: attention={model.attend.name} is not {self.config.reference}: {difference}.")
        # Each layer's attention alone, on as many sequences and tokens as fit in its time and in memory.
        checked, of_layers = fitting(
            device, *part(B, T, device), lambda b, t: check_layers(model, batch.beginning(b, t), key, self.shape.dtype)
        )
        layers = checked | {"parity/attention_tokens": [*of_layers]}
        if difference := wrong_alone(layers):
            log.warning(f"parity: attention={model.attend.name} is wrong: {difference}.")
        return measured | layers | {"parity/tokens": [*window]}

    def _compare(self, model: GPT, batch: Batch, key: DropoutKey | None, loss_scale: float) -> dict[str, Any]:
        def run(attend: Attention, dtype: torch.dtype) -> FwdBwd:
            return fwd_bwd(model, batch, key, attend, dtype, loss_scale)

        reference = run(self.reference, self.shape.dtype)
        difference, worst = differences(run(model.attend, self.shape.dtype), reference)
        with full_precision_products():
            noise, _ = differences(reference, run(self.reference, self.exact_dtype))
        return {
            **{f"parity/{name}": value for name, value in difference.items()},
            "parity/worst_parameter": worst,
            **{f"parity/noise_{name}": value for name, value in noise.items()},
        }

    def _planned(self, model: GPT, B: int, T: int) -> tuple[int, int]:
        """The part of (B, T) whose costliest pass, `exact`, should fit. It has the logits with their softmax and
        gradient and, per layer, three (B, H, T, T) matrices of a naive reference: its scores, its probabilities, and
        those dropped and cast."""
        most = MEMORY_SHARE * free_memory(self.shape.device) / self.exact_dtype.itemsize
        matrices = 3 * model.config.n_layers * self.shape.n_heads if self.config.reference == "naive" else 0
        while B * T > 1 and B * T * (matrices * T + 4 * model.vocab_size) > most:
            B, T = smaller(B, T)
        return B, T


def fitting(device: torch.device, B: int, T: int, work: Callable[[int, int], R]) -> tuple[R, tuple[int, int]]:
    """work(B, T), with fewer sequences or tokens for as long as it runs out of memory; and how many it had at last."""
    while True:
        try:
            return work(B, T), (B, T)
        except torch.OutOfMemoryError:
            if B * T == 1:
                raise
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the allocator's unused memory goes back to the device
        # Outside the handler, whose traceback would keep the failed pass's tensors alive.
        B, T = smaller(B, T)


def smaller(B: int, T: int) -> tuple[int, int]:
    """Half of the sequences or, for a single one, half of its tokens."""
    return (B // 2, T) if B > 1 else (1, max(1, T // 2))


@dataclass
class FwdBwd:
    """The result of one forward and backward pass."""

    loss: Tensor  # scalar
    logits: Tensor  # (B, T, vocab_size)
    gradients: dict[str, Tensor]


def fwd_bwd(
    model: GPT,
    batch: Batch,
    key: DropoutKey | None,
    attend: Attention,
    dtype: torch.dtype,
    loss_scale: float = 1.0,
) -> FwdBwd:
    """One pass through `model` with `attend`, computing in `dtype`; no parameter's .grad is touched.

    Half precisions use autocast, as in training; fp64 copies the parameters.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if dtype is torch.float64:
        parameters = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    with torch.autocast(batch.inputs.device.type, dtype, enabled=dtype.itemsize == 2):
        return torch.func.functional_call(
            FwdBwdModule(model),
            {f"model.{name}": p for name, p in parameters.items()},
            (batch, key, attend, parameters, loss_scale),
        )


class FwdBwdModule(nn.Module):
    """A model's loss, logits and gradients in one call, so that a functional call's parameters are still in place
    when activation checkpointing runs the forward pass again."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(
        self,
        batch: Batch,
        key: DropoutKey | None,
        attend: Attention,
        parameters: Mapping[str, Tensor],
        loss_scale: float,
    ) -> FwdBwd:
        options = {"dropout_key": key, "attend": attend, "document_starts": batch.document_starts}
        logits = self.model(batch.inputs, **options)  # (B, T, vocab_size)
        x = logits.to(accum_dtype(logits.dtype)).flatten(0, 1)  # (B * T, vocab_size)
        loss = F.cross_entropy(x, batch.targets.flatten(), ignore_index=IGNORE_INDEX)
        # A second head has no part in these logits.
        gradients = torch.autograd.grad(
            loss * loss_scale, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        unscaled = {name: g / loss_scale for name, g in zip(parameters, gradients, strict=True)}
        return FwdBwd(loss.detach(), logits.detach(), unscaled)


def differences(a: FwdBwd, b: FwdBwd) -> tuple[dict[str, float], str]:
    """|loss difference|, the largest |logit difference|, and the largest relative error of a parameter's gradient,
    ||a - b|| / ||b||; and that parameter."""
    dtype = accum_dtype(torch.promote_types(a.logits.dtype, b.logits.dtype))
    # One sequence at a time: copies of all logits in `dtype` may not fit in memory.
    logits = torch.stack([(x.to(dtype) - y.to(dtype)).abs().max() for x, y in zip(a.logits, b.logits, strict=True)])
    relative = torch.stack([relative_error(a.gradients[name], b.gradients[name]) for name in b.gradients])
    errors = dict(zip(b.gradients, relative.tolist(), strict=True))
    worst = max(errors, key=lambda name: rank(errors[name]))
    loss = (a.loss.double() - b.loss.double()).abs().item()
    return {"loss_diff": loss, "logits_max_diff": logits.max().item(), "grad_rel_err": errors[worst]}, worst


def relative_error(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| / ||b||, 0 where both are 0."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    error = torch.linalg.vector_norm(a.to(dtype) - b.to(dtype)).double()
    return torch.where(error == 0, error, error / torch.linalg.vector_norm(b).double())
