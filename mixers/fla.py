"""The kernels of flash-linear-attention (https://github.com/fla-org/flash-linear-attention), an optional package."""

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import Decay, MixerError, MixerInputs, Recurrence, document_starts

# Recurrence -> the module <name> of the package, with the function chunk_<name>.
KERNELS = {
    Recurrence(Decay.none): "linear_attn",
    Recurrence(Decay.fixed): "simple_gla",
    Recurrence(Decay.head): "simple_gla",
    Recurrence(Decay.channel): "gla",
    Recurrence(Decay.none, True): "delta_rule",
    Recurrence(Decay.head, True): "gated_delta_rule",
    Recurrence(Decay.channel, True): "kda",
}


@lru_cache(maxsize=8)
def check_device(device: torch.device) -> None:
    """Raise MixerError where the kernels cannot run."""
    if device.type != "cuda":
        raise MixerError(
            f"mixer=fla needs a GPU and not {device.type}; choose mixer=chunked (in a check, chunked-...)."
        )
    if find_spec("fla") is None:
        raise MixerError("mixer=fla needs a package: pip install flash-linear-attention, or choose mixer=chunked.")


@lru_cache(maxsize=64)  # each layer asks at each step, and the release stands in a file
def check_gradients(recurrence: Recurrence, device: torch.device) -> None:
    """Raise MixerError where the package's backward would compute wrong gradients and therefore refuses to run.

    https://github.com/fla-org/flash-linear-attention/issues/640
    """
    is_affected = recurrence.decay in (Decay.fixed, Decay.head) and torch.cuda.get_device_capability(device)[0] == 9
    release = metadata.version("triton")
    if is_affected and tuple(map(int, release.split(".")[:3])) < (3, 7, 1) and find_spec("tilelang") is None:
        raise MixerError(
            f"mixer=fla has no gradients with decay={recurrence.decay.value} on a Hopper GPU with Triton {release}, "
            "which compiles them wrong: pip install tilelang or 'triton>=3.7.1', or choose mixer=chunked."
        )


def fla(inputs: MixerInputs, recurrence: Recurrence, scale: float, unit: bool = False) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, V) in v's dtype, and the last state (B, H, K, V) in fp32. Raises MixerError.

    unit  whether the kernels first divide q and k by their lengths; those of the delta rule can
    """
    check_device(inputs.v.device)
    if recurrence not in KERNELS:
        raise MixerError(f"mixer=fla has no kernel for decay={recurrence.decay.value} with the delta rule.")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in vars(inputs).values()):
        check_gradients(recurrence, inputs.v.device)
    name = KERNELS[recurrence]
    function = getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
    if unit:
        function = partial(function, use_qk_l2norm_in_kernel=True)
    return through_package(function, inputs, recurrence, scale)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """SiLU of a causal convolution (C, taps) of each channel of x (B, T, C); no tap crosses a document."""
    function = import_module("fla.modules.causal_conv1d").causal_conv1d
    if documents is None:
        return function(x, weight, bias, activation="silu")[0]
    rows = x.flatten(0, 1)[None]
    return function(rows, weight, bias, activation="silu", cu_seqlens=bounds(documents))[0].view(x.shape)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, activation: str, eps: float) -> Tensor:
    """x over the root of its last axis' mean square, times weight and activation(gate); silu or sigmoid."""
    function = import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    return function(x, gate, weight, None, activation="swish" if activation == "silu" else activation, eps=eps)


def step_decays(steps: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """-exp(A_log) softplus(steps + dt_bias) in fp32, for steps (B, T, H, K), A_log (H,) and dt_bias (H K,)."""
    return import_module("fla.ops.kda.gate").fused_kda_gate(steps, A_log, dt_bias)


def bounds(documents: Tensor) -> Tensor:
    """Where each document of rows (B, T) begins, one row after the other, and where the last ends."""
    passing = torch.is_inference_mode_enabled() or documents.is_inference()  # such tensors count no changes
    return bounds_of(documents, object() if passing else documents._version)


@lru_cache(maxsize=1)  # the layers of a step share it: to find it waits for the GPU
def bounds_of(documents: Tensor, version: object) -> Tensor:
    """As `bounds`, of a version of documents, which may change in place."""
    return F.pad(document_starts(documents).flatten().nonzero()[:, 0].int(), (0, 1), value=documents.numel())


def through_package(
    function: Callable[..., Any], inputs: MixerInputs, recurrence: Recurrence, scale: float
) -> tuple[Tensor, Tensor]:
    """As `fla`, by a function that is called as those of the package.

    Rows with documents go in one after the other, as the package takes them; `initial` then stays out.
    """
    B, H, T, _ = inputs.q.shape
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))  # (B, T, H, D)
    options: dict[str, Any] = {"scale": scale, "output_final_state": True}
    if inputs.log_decay is not None:
        log_decay = inputs.log_decay.transpose(1, 2).float()
        options["g"] = log_decay if recurrence.decay is Decay.channel else log_decay[..., 0]
    beta = None if inputs.beta is None else inputs.beta.transpose(1, 2)  # (B, T, H)
    if recurrence.delta:
        options["beta"] = q.new_ones(B, T, H) if beta is None else beta
    elif beta is not None:
        v = v * beta[..., None].to(v.dtype)
    if recurrence.decay is Decay.none and not recurrence.delta:
        options["normalize"] = False
    options["initial_state"] = None if inputs.initial is None else inputs.initial.float()
    if inputs.documents is None:
        out, state = function(q, k, v, **options)
        return out.transpose(1, 2), state
    if inputs.initial is not None:
        raise MixerError("mixer=fla takes no initial state together with documents; choose mixer=chunked.")
    options = {name: x.flatten(0, 1)[None] if isinstance(x, Tensor) else x for name, x in options.items()}
    out, states = function(*(x.flatten(0, 1)[None] for x in (q, k, v)), cu_seqlens=bounds(inputs.documents), **options)
    last = document_starts(inputs.documents).sum(dim=1).cumsum(dim=0) - 1  # the document at each row's end
    return out[0].unflatten(0, (B, T)).transpose(1, 2), states[last]
