"""A forward and backward pass outside the training, and the differences of two of them, for the probe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Attention, DropoutKey
from attention.precision import accum_dtype
from data.batches import Batch
from model.gpt import GPT
from model.loss import IGNORE_INDEX


@dataclass
class FwdBwd:
    """The result of one forward and backward pass."""

    loss: Tensor  # scalar
    logits: Tensor  # (B, T, vocab_size)
    gradients: dict[str, Tensor]


@dataclass
class Differences:
    """Two of them compared: |loss difference|, the largest |logit difference|, and each parameter's relative error of
    the gradient, ||a - b|| / ||b||."""

    loss: float
    logits: float
    gradients: dict[str, float]


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
    device = batch.inputs.device.type
    step = FwdBwdModule(model)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if dtype is torch.float64:
        parameters = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    half = dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(device, dtype, enabled=half):
        return torch.func.functional_call(
            step,
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


def differences(a: FwdBwd, b: FwdBwd) -> Differences:
    """The differences of a and b."""
    dtype = accum_dtype(torch.promote_types(a.logits.dtype, b.logits.dtype))
    # One sequence at a time: copies of all logits in `dtype` may not fit in memory.
    logits = torch.stack([(x.to(dtype) - y.to(dtype)).abs().max() for x, y in zip(a.logits, b.logits, strict=True)])
    errors = torch.stack([relative_error(a.gradients[name], b.gradients[name]) for name in b.gradients])
    return Differences(
        loss=(a.loss.double() - b.loss.double()).abs().item(),
        logits=logits.max().item(),
        gradients=dict(zip(b.gradients, errors.tolist(), strict=True)),
    )


def relative_error(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| / ||b||, 0 where both are 0."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    error = torch.linalg.vector_norm(a.to(dtype) - b.to(dtype)).double()
    return torch.where(error == 0, error, error / torch.linalg.vector_norm(b).double())


@contextlib.contextmanager
def memory_returned(device: torch.device) -> Iterator[None]:
    """At the end of the block, return the allocator's unused memory to the device."""
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
