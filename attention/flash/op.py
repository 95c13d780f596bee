"""The kernels as torch custom operators, and the attention that calls them.

Custom operators are opaque to torch.compile and carry their own shapes and gradients, so a compiled model has no graph
break; the dropout key is a tensor among their arguments, so new steps and replayed CUDA graphs draw new masks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import gpu
from attention.dropout import drop_threshold
from attention.flash.configs import KernelConfigs, Options, choose
from attention.gpu import ALIGNMENT, HAS_TRITON
from attention.interface import Attention, AttentionOutput, AttentionShape, Terms, UnsupportedAttention

if HAS_TRITON:
    import triton

    from attention.flash.backward import backward
    from attention.flash.forward import forward
    from attention.flash.tiles import addressable, rows_like

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel_configs(q: Tensor, k: Tensor, threshold: int) -> KernelConfigs:
    """The block sizes for these queries and keys."""
    return choose(q.shape[-1], k.shape[2], q.dtype, threshold > 0, gpu.capability(q.device))


def check(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedAttention unless the kernels can serve this head size and dtype on this device."""
    if head_dim > MAX_HEAD_DIM:
        raise UnsupportedAttention(
            f"attention=flash takes head sizes up to {MAX_HEAD_DIM}, not {head_dim}; "
            "raise model.n_heads or choose attention=tiled."
        )
    if dtype not in DTYPES:
        raise UnsupportedAttention(
            f"attention=flash takes fp32, bf16 or fp16, not {dtype}; set training.precision or choose attention=tiled."
        )
    if not HAS_TRITON:
        raise UnsupportedAttention("attention=flash needs Triton, which is not installed; choose attention=tiled.")
    if triton.knobs.runtime.interpret:
        return
    if device.type != "cuda" or torch.version.hip:
        raise UnsupportedAttention(
            f"attention=flash needs a CUDA GPU and the device is {device}; choose attention=tiled, or set "
            "TRITON_INTERPRET=1 to run the kernels, slowly, in Triton's interpreter."
        )
    if gpu.capability(device) < (8, 0):
        raise UnsupportedAttention(
            f"attention=flash needs a GPU of compute capability 8.0 (Ampere) or newer and {device} has "
            f"{'.'.join(map(str, gpu.capability(device)))}; choose attention=sdpa."
        )


@torch.library.custom_op("gpt_attention::flash_forward", mutates_args=())
def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor | None, causal: bool, scale: float, threshold: int, tf32: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and lse2 as `forward` gives them; key (7,) int64 is DropoutKey.pack's, threshold that of Options."""
    check(q.shape[-1], q.dtype, q.device)
    out = torch.empty_like(q)
    with torch.cuda.device_of(q):
        q, k, v = addressable(q), addressable(k), addressable(v)
        lse, lse2 = forward(q, k, v, out, key, Options(causal, scale, threshold, tf32), kernel_configs(q, k, threshold))
    return out, lse, lse2


@flash_forward.register_fake
def _(q, k, v, key, causal, scale, threshold, tf32):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32), rows_like(q)


@torch.library.custom_op("gpt_attention::flash_backward", mutates_args=())
def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse2: Tensor,
    key: Tensor | None,
    causal: bool,
    scale: float,
    threshold: int,
    tf32: bool,
) -> list[Tensor]:
    """The gradients, as `empty_gradients` lays them out."""
    gradients = empty_gradients(q, k, v)
    dq_dk_dv = split_qkv_grad(gradients, q, k)
    options = Options(causal, scale, threshold, tf32)
    with torch.cuda.device_of(q):
        q, k, v = addressable(q), addressable(k), addressable(v)
        backward(do, q, k, v, out, lse2, dq_dk_dv, key, options, kernel_configs(q, k, threshold))
    return gradients


@flash_backward.register_fake
def _(do, q, k, v, out, lse2, key, causal, scale, threshold, tf32):
    return empty_gradients(q, k, v)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Room for dq, dk and dv: one tensor where q, k, v lie in memory as views of one projection (B, T, H + 2 H_kv, D).

    It then is the projection's gradient as it stands, and a compiled model copies nothing to put that together.
    """
    B, H, T, D = q.shape
    row = (H + 2 * k.shape[1]) * D
    if k.shape[2] == T and q.stride() == k.stride() == v.stride() == (T * row, D, row, 1):
        return [q.new_empty(B, T, H + 2 * k.shape[1], D)]
    return [torch.empty_like(x) for x in (q, k, v)]


def split_qkv_grad(gradients: list[Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq (B, H, T, D), dk and dv (B, H_kv, S, D): what `empty_gradients` made or views of it."""
    if len(gradients) == 1:
        gradients = [x.transpose(1, 2) for x in gradients[0].split([q.shape[1], k.shape[1], k.shape[1]], dim=2)]
    dq, dk, dv = gradients
    return dq, dk, dv


def _setup_context(ctx, inputs, output):
    q, k, v, key, *ctx.options = inputs
    out, lse, lse2 = output
    ctx.save_for_backward(q, k, v, out, lse2, key)
    ctx.mark_non_differentiable(lse, lse2)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, *_):
    if do is None:
        return (None,) * 8
    q, k, v, out, lse2, key = ctx.saved_tensors
    dq, dk, dv = split_qkv_grad(flash_backward(do, q, k, v, out, lse2, key, *ctx.options), q, k)
    return dq, dk, dv, None, None, None, None, None


flash_forward.register_autograd(_backward, setup_context=_setup_context)


class FlashAttention(Attention):
    """FlashAttention-2 in Triton, with dropout that replays (attention/flash/)."""

    name = "flash"
    options = frozenset({"allow_tf32"})
    supports = frozenset({"full"})

    def check(self, shape: AttentionShape) -> None:
        super().check(shape)
        check(shape.head_dim, shape.dtype, shape.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> AttentionOutput:
        D, scale = q.shape[-1], terms.scale
        key, threshold = None, 0
        if terms.dropout_key is not None:
            key, threshold = terms.dropout_key.pack(q.device), drop_threshold(self.dropout)
        # The kernels take the maximum before they scale, which only a positive scale allows.
        if scale < 0:
            q, scale = -q, -scale
        elif scale == 0:
            q, scale = q * 0, 1.0
        q, k, v = prepared(q), prepared(k), prepared(v)
        causal, tf32 = terms.score.causal, self.config.allow_tf32
        out, lse, _ = flash_forward(q, k, v, key, causal, scale, threshold, tf32)
        return AttentionOutput(out[..., :D], lse)


def prepared(x: Tensor) -> Tensor:
    """x with a contiguous last dimension that spans a multiple of 16 bytes, copied only where it has none."""
    excess = -x.shape[-1] % (ALIGNMENT // x.element_size())
    if excess:
        return F.pad(x, (0, excess))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if expanded or x.stride(-1) != 1 else x
