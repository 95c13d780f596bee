"""The kernels as torch custom operators, and the attention that calls them.

Custom operators are opaque to torch.compile and carry their own shapes and gradients, so a compiled model has no graph
break; the dropout key is a tensor among their arguments, so new steps and replayed CUDA graphs draw new masks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from attention.dropout import DropoutKey, drop_threshold
from attention.flash.backward import backward
from attention.flash.configs import choose
from attention.flash.forward import forward
from attention.flash.tiles import ALIGNMENT, addressable
from attention.interface import Attention, AttentionShape, UnsupportedAttention

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def capability(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability; Triton's interpreter stands in for a Hopper GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@torch.library.custom_op("gpt_attention::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, causal: bool, scale: float, threshold: int, tf32: bool
) -> tuple[Tensor, Tensor]:
    """out and lse; key (4,) int64 is DropoutKey.pack's, threshold the number of the 256 byte values dropped."""
    blocks = choose(q.shape[-1], q.dtype, threshold > 0, capability(q.device))
    q, k, v = addressable(q), addressable(k), addressable(v)
    return forward(q, k, v, key, causal, scale, threshold, tf32, blocks.forward)


@flash_forward.register_fake
def _(q, k, v, key, causal, scale, threshold, tf32):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("gpt_attention::flash_backward", mutates_args=())
def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key: Tensor | None,
    causal: bool,
    scale: float,
    threshold: int,
    tf32: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    blocks = choose(q.shape[-1], q.dtype, threshold > 0, capability(q.device))
    q, k, v = addressable(q), addressable(k), addressable(v)
    return backward(do, q, k, v, out, lse, key, causal, scale, threshold, tf32, blocks.dq, blocks.dkdv)


@flash_backward.register_fake
def _(do, q, k, v, out, lse, key, causal, scale, threshold, tf32):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx, inputs, output):
    q, k, v, key, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, key)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, _):
    if do is None:
        return (None,) * 8
    q, k, v, out, lse, key = ctx.saved_tensors
    dq, dk, dv = flash_backward(do, q, k, v, out, lse, key, *ctx.options)
    return dq, dk, dv, None, None, None, None, None


flash_forward.register_autograd(_backward, setup_context=_setup_context)


class FlashAttention(Attention):
    """FlashAttention-2 in Triton, with dropout that replays (attention/flash/)."""

    name = "flash"

    def check(self, shape: AttentionShape) -> None:
        if shape.head_dim > MAX_HEAD_DIM:
            raise UnsupportedAttention(
                f"attention=flash takes head sizes up to {MAX_HEAD_DIM}, not {shape.head_dim}; "
                "raise model.n_heads or choose attention=tiled."
            )
        if shape.dtype not in DTYPES:
            raise UnsupportedAttention(
                f"attention=flash takes fp32, bf16 or fp16, not {shape.dtype}; "
                "set training.precision or choose attention=tiled."
            )
        if triton.knobs.runtime.interpret:
            return
        if shape.device.type != "cuda" or torch.version.hip:
            raise UnsupportedAttention(
                f"attention=flash needs a CUDA GPU and the device is {shape.device}; choose attention=tiled, or set "
                "TRITON_INTERPRET=1 to run the kernels, slowly, in Triton's interpreter."
            )
        if capability(shape.device) < (8, 0):
            raise UnsupportedAttention(
                f"attention=flash needs a GPU of compute capability 8.0 (Ampere) or newer and {shape.device} has "
                f"{'.'.join(map(str, capability(shape.device)))}; choose attention=sdpa."
            )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        D = q.shape[-1]
        self.check(AttentionShape(D, q.shape[1], k.shape[1], q.dtype, q.device))
        key, threshold = None, 0
        if dropout_key is not None:
            key, threshold = dropout_key.pack(q.device), drop_threshold(self.dropout)
        # The running maximum is taken before scaling, which a negative scale would turn into a minimum.
        q, k, v = prepared(-q if scale < 0 else q), prepared(k), prepared(v)
        out, lse = flash_forward(q, k, v, key, causal, abs(scale), threshold, self.config.allow_tf32)
        return out[..., :D], lse


def prepared(x: Tensor) -> Tensor:
    """x with a contiguous last dimension that spans a multiple of 16 bytes, copied only where it has none."""
    excess = -x.shape[-1] % (ALIGNMENT // x.element_size())
    if excess:
        return F.pad(x, (0, excess))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded or x.stride(-1) != 1 else x
