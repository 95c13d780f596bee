"""The probe that asks, in the middle of a run, what another attention would have computed.

A training micro-batch goes forward and backward three times more through the weights of the moment:

    run        the run's attention, in the run's precision, uncompiled
    reference  another attention, in the same precision
    exact      the reference in a higher precision: fp32 beside bf16 and fp16, fp64 beside fp32

with the same dropout masks, attention's by key and the residual stream's by reseeding its generator.
`run - reference` is what the choice of attention changes; `reference - exact` is what rounding alone changes,
the floor below which a difference says nothing. Of two right implementations each is about as far from `exact`
as the other, so they differ by no more than a small multiple of the floor.

The probe is a spectator: gradients, weights and random-number generators are left as they were found.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import (
    Attention,
    AttentionConfig,
    AttentionShape,
    DropoutKey,
    DropoutRng,
    build_attention,
)
from errors import UserError
from model.gpt import GPT
from model.loss import IGNORE_INDEX

log = logging.getLogger(__name__)

# A probe takes at most this part of the memory that is free when it starts.
MEMORY_SHARE = 0.8
# Two right implementations differ by about the floor itself; wrong ones by tens of times as much after a few updates.
MARGIN = 4.0


@dataclass
class ParityConfig:
    """What a user chooses under `parity.*`.

    every      updates between two probes; 0: no probe
    reference  the attention to compare with
    """

    every: int = 0
    reference: str = "naive"


class ParityError(UserError, ValueError):
    """A comparison that would mean nothing; the message says what to change."""


@dataclass
class Pass:
    """What one forward and backward pass gives."""

    loss: Tensor  # scalar
    logits: Tensor  # (B, T, vocab_size)
    gradients: dict[str, Tensor]


class ParityProbe:
    """Compares a run's attention with a reference on the run's own weights and batches."""

    def __init__(self, config: ParityConfig, attention: AttentionConfig, shape: AttentionShape) -> None:
        """Build the reference.

        attention  the run's
        shape      what the model asks of its attention; its dtype is the precision of the run

        Raises ParityError where the masks of the two cannot be the same, UnsupportedAttention where the reference
        cannot serve the model in the run's precision and in the higher one.
        """
        if config.every < 0:
            raise ParityError(f"parity.every={config.every} must be a number of steps, or 0 for no probe.")
        if attention.dropout > 0 and attention.rng is DropoutRng.torch:
            raise ParityError(
                "parity.every with attention.rng=torch would compare different dropout masks; "
                "set attention.rng=replay, attention.dropout=0 or parity.every=0."
            )
        self.config, self.shape = config, shape
        self.exact_dtype = torch.float64 if shape.dtype is torch.float32 else torch.float32
        self.reference = build_attention(AttentionConfig(name=config.reference, dropout=attention.dropout))
        for dtype in (shape.dtype, self.exact_dtype):
            self.reference.check(replace(shape, dtype=dtype))
        self.window: tuple[int, int] | None = None  # the largest (sequences, tokens) that fitted, once one did not

    def due(self, step: int) -> bool:
        """Whether update `step`, counted from 0, is one to probe."""
        return self.config.every > 0 and step % self.config.every == 0

    def measure(
        self,
        model: GPT,
        inputs: Tensor,
        targets: Tensor,
        key: DropoutKey | None,
        reseed: Callable[[], object],
        loss_scale: float = 1.0,
    ) -> dict[str, Any]:
        """Compare on one micro-batch.

        model            not compiled, in the mode it trains in
        inputs, targets  (B, T) each
        key              of the micro-batch's attention dropout
        reseed           seeds the default generators as the training step did before its forward pass
        loss_scale       multiplies the loss before the backward pass (fp16), and is divided out again

        Returns `parity/*` as docs/experiments.md lists them. Where three passes do not fit the memory, fewer
        sequences or fewer tokens are compared, which is logged and shows in parity/tokens.
        """
        B, T = self.window or self._first_window(model, *inputs.shape)
        while True:
            window = slice(0, B), slice(0, T)
            try:
                with undisturbed(inputs.device):
                    measured = self._compare(model, inputs[window], targets[window], key, reseed, loss_scale)
                return measured | {"parity/tokens": f"{B}x{T}"}
            except torch.OutOfMemoryError:
                if B * T == 1:
                    raise
            # Outside the handler, whose traceback would keep the failed pass's tensors alive.
            B, T = smaller(B, T)
            self._settle_for(B, T, *inputs.shape)

    def _compare(
        self,
        model: GPT,
        inputs: Tensor,
        targets: Tensor,
        key: DropoutKey | None,
        reseed: Callable[[], object],
        loss_scale: float,
    ) -> dict[str, Any]:
        def run(attend: Attention, dtype: torch.dtype) -> Pass:
            reseed()
            return forward_backward(model, inputs, targets, key, attend, dtype, loss_scale)

        reference = run(self.reference, self.shape.dtype)
        measured: dict[str, Any] = {}
        loss, logits, gradient, parameter = differences(run(model.attend, self.shape.dtype), reference)
        measured["parity/loss_diff"], measured["parity/logits_max_diff"] = loss, logits
        measured["parity/grad_rel_err"], measured["parity/worst_parameter"] = gradient, parameter
        with full_precision_products():
            exact = run(self.reference, self.exact_dtype)
        loss, logits, gradient, _ = differences(reference, exact)
        measured["parity/noise_loss_diff"], measured["parity/noise_logits_max_diff"] = loss, logits
        measured["parity/noise_grad_rel_err"] = gradient
        return measured

    def _first_window(self, model: GPT, B: int, T: int) -> tuple[int, int]:
        """As much of (B, T) as should fit, by the size of the reference's scores and of the logits."""
        free, window = free_memory(self.shape.device), (B, T)
        while math.prod(window) > 1 and self._estimate(model, *window) > MEMORY_SHARE * free:
            window = smaller(*window)
        if window != (B, T):
            self._settle_for(*window, B, T)
        return window

    def _estimate(self, model: GPT, B: int, T: int) -> int:
        """Bytes of the costliest pass, `exact`: per layer three (B, H, T, T) matrices of a naive reference (its
        scores, its probabilities, and those dropped and cast), and the logits with their softmax and gradient."""
        scores = 3 * model.config.n_layers * B * self.shape.n_heads * T * T if self.config.reference == "naive" else 0
        return self.exact_dtype.itemsize * (scores + 4 * B * T * model.vocab_size)

    def _settle_for(self, B: int, T: int, of_B: int, of_T: int) -> None:
        self.window = (B, T)
        log.warning(
            f"parity: attention={self.config.reference} on {of_B} sequences of {of_T} tokens does not fit the memory; "
            f"comparing {B} of {T}."
        )


def forward_backward(
    model: GPT,
    inputs: Tensor,
    targets: Tensor,
    key: DropoutKey | None,
    attend: Attention,
    dtype: torch.dtype,
    loss_scale: float = 1.0,
) -> Pass:
    """One pass through `model` with `attend`, computing in `dtype`; no parameter's .grad is touched.

    Half precisions are autocast, as in training; fp64 copies the parameters.
    """
    device = inputs.device.type
    step = DifferentiatedStep(model)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if dtype is torch.float64:
        parameters = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    with torch.autocast(device, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        return torch.func.functional_call(
            step,
            {f"model.{name}": p for name, p in parameters.items()},
            (inputs, targets, key, attend, parameters, loss_scale),
        )


class DifferentiatedStep(nn.Module):
    """A model's loss, logits and gradients in one call, so that a functional call's parameters are still in place
    when activation checkpointing runs the forward pass again."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        key: DropoutKey | None,
        attend: Attention,
        parameters: Mapping[str, Tensor],
        loss_scale: float,
    ) -> Pass:
        logits = self.model(inputs, dropout_key=key, attend=attend)  # (B, T, vocab_size)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        gradients = torch.autograd.grad(loss * loss_scale, list(parameters.values()))
        unscaled = {name: g / loss_scale for name, g in zip(parameters, gradients, strict=True)}
        return Pass(loss.detach(), logits.detach(), unscaled)


def differences(a: Pass, b: Pass) -> tuple[float, float, float, str]:
    """How far a is from b: |loss difference|, the largest |logit difference|, and the largest relative error
    ||a - b|| / ||b|| of a parameter's gradient, with that parameter's name. A NaN is the largest of all."""
    loss = (a.loss.double() - b.loss.double()).abs().item()
    wide = torch.promote_types(torch.promote_types(a.logits.dtype, b.logits.dtype), torch.float32)
    # One sequence at a time: wide copies of all logits may be more memory than there is.
    logits = torch.stack([(x.to(wide) - y.to(wide)).abs().max() for x, y in zip(a.logits, b.logits, strict=True)])
    names = list(b.gradients)
    errors = torch.stack([relative_error(a.gradients[name], b.gradients[name]) for name in names])
    worst = int(errors.nan_to_num(nan=math.inf).argmax())
    return loss, logits.max().item(), errors[worst].item(), names[worst]


def relative_error(a: Tensor, b: Tensor) -> Tensor:
    """||a - b|| / ||b||, 0 where both are 0."""
    wide = torch.promote_types(a.dtype, b.dtype)
    error = torch.linalg.vector_norm(a.to(wide) - b.to(wide)).double()
    return torch.where(error == 0, error, error / torch.linalg.vector_norm(b).double())


def beyond_rounding(measured: Mapping[str, Any]) -> str | None:
    """What in a measurement rounding does not explain: a sentence, or None where it explains everything.

    Logits and gradients may differ by MARGIN times the noise. The loss does not enter: the difference of two scalars
    is close to zero by accident too often to be a floor.
    """
    for name, what in (
        ("logits_max_diff", "a logit"),
        ("grad_rel_err", f"the gradient of {measured['parity/worst_parameter']}"),
    ):
        difference, noise = measured[f"parity/{name}"], measured[f"parity/noise_{name}"]
        if not difference <= MARGIN * noise:  # a NaN is not
            return f"{what} differs from the reference's by {difference:.2g}, where rounding explains {noise:.2g}"
    return None


def summarise(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `parity` entry of summary.json from the lines of metrics.jsonl: the worst of every check, and the largest
    noise. None where nothing was probed."""
    checks = [line for line in lines if "parity/loss_diff" in line]
    if not checks:
        return None

    def size(check: Mapping[str, Any], name: str) -> float:
        value = float(check[f"parity/{name}"])  # metrics.jsonl has "nan" and "inf" as text
        return math.inf if math.isnan(value) else value

    def worst(name: str) -> float:
        return max(checks, key=lambda check: size(check, name))[f"parity/{name}"]

    measures = ("loss_diff", "logits_max_diff", "grad_rel_err")
    return {
        "checks": len(checks),
        **{f"worst_{name}": worst(name) for name in measures},
        "worst_parameter": max(checks, key=lambda check: size(check, "grad_rel_err"))["parity/worst_parameter"],
        **{f"noise_{name}": worst(f"noise_{name}") for name in measures},
        "tokens": checks[-1]["parity/tokens"],
    }


def smaller(B: int, T: int) -> tuple[int, int]:
    """Half of the sequences or, of a single one, half of its tokens."""
    return (B // 2, T) if B > 1 else (1, max(1, T // 2))


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on `device`, as far as the system says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system counts them
        return math.inf


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Put the default generators back on the way out, and return what the allocator took to the device."""
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()


@contextlib.contextmanager
def full_precision_products() -> Iterator[None]:
    """fp32 matrix products in fp32, without TF32, whatever the run allows itself."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
