"""The residual stream's next sum and its norm in one pass each way, where the compiler takes several.

    s = x + drop(out),   n = (s - mean(s)) / sqrt(var(s) + eps),   h = n w + b
    dn = dh w,   dx = ds + (dn - mean(dn) - n mean(dn n)) / sqrt(...),   dout = drop(dx),   dw = sum dh n,   db = sum dh

or with an RMS norm, without the means of s and dn. ds is the gradient of everything after s but the norm. s is in the
stream's precision, h and dout are in that of the products after and before, so nothing has to be cast in between.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attention.gpu import HAS_TRITON
from model.dropout import Mask, keep_bits
from model.norms import RMSNorm

if HAS_TRITON:
    from model.norm_kernel import launch_add_norm, launch_add_norm_gradient

WIDEST = 8192  # columns that a program's registers hold


def can_fuse_stream(x: Tensor) -> bool:
    """Whether sums and norms of the stream x (..., C) may be one pass.

    True in training with autocast on a GPU, for a stream in fp32 or in autocast's precision.
    """
    kind = x.device.type
    return (
        HAS_TRITON
        and torch.is_grad_enabled()
        and x.is_cuda
        and x.shape[-1] <= WIDEST
        and torch.is_autocast_enabled(kind)
        and x.dtype in (torch.float32, torch.get_autocast_dtype(kind))
    )


def can_add_norm(x: Tensor, out: Tensor, norm: nn.Module) -> bool:
    """Whether `added_and_normed` takes a stream x (..., C), a sub-layer's output and the norm after their sum."""
    in_half = can_fuse_stream(x) and out.dtype == torch.get_autocast_dtype(x.device.type)
    return in_half and isinstance(norm, nn.LayerNorm | RMSNorm)


def added_and_normed(x: Tensor, out: Tensor, mask: Mask | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum of a stream and a sub-layer's output (B, T, C), which `mask` drops; and its norm, in out's precision."""
    if isinstance(norm, RMSNorm):
        weight, bias, centred = norm.scale(), None, False
    else:
        assert isinstance(norm, nn.LayerNorm)
        weight, bias, centred = norm.weight, norm.bias, True
    bits, scale = (None, 1.0) if mask is None else (mask.bits, mask.scale)
    total, h, _ = add_norm(x, out, bits, scale, weight, bias, norm.eps, centred)
    return total, h


def is_shared(x: Tensor, d_h: Tensor, bits: Tensor | None) -> bool:
    """Whether the gradients of x and out are the same tensor."""
    return bits is None and x.dtype == d_h.dtype


@torch.library.custom_op("gpt::add_norm", mutates_args=())
def add_norm(
    x: Tensor,
    out: Tensor,
    bits: Tensor | None,
    scale: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """s (..., C) in x's precision, h (..., C) in out's, and (N, 1) or (N, 2) fp32: 1 / sqrt(...) and the mean of s.

    bits, scale    of a Mask
    weight, bias   (C,) of the norm; None: 1 and 0
    centred        whether the norm subtracts the mean
    """
    if x.is_cuda:
        x, out = x.contiguous(), out.contiguous()
        return launch_add_norm(x, out, bits, scale, weight, bias, eps, centred)
    added = out.float() if bits is None else torch.where(keeps(bits, out), out.float() * scale, 0)
    total = (x + added).to(x.dtype)
    n = total.float().flatten(0, -2)
    mean = n.mean(-1, keepdim=True)
    n = n - mean if centred else n
    rstd = (n.square().mean(-1, keepdim=True) + eps).rsqrt()
    h = n * rstd if weight is None else n * rstd * weight
    h = h if bias is None else h + bias
    return total, h.to(out.dtype).view(out.shape), torch.cat([rstd, mean], dim=-1) if centred else rstd


@torch.library.custom_op("gpt::add_norm_gradient", mutates_args=())
def add_norm_gradient(
    d_sum: Tensor,
    d_h: Tensor,
    x: Tensor,
    stats: Tensor,
    bits: Tensor | None,
    scale: float,
    weight: Tensor | None,
    n_sums: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (..., C); dout (..., C), empty where it is dx; and dw and db, as many as `n_sums`, (n_sums, C) fp32.

    x, stats  the sum s and the numbers that `add_norm` returns
    """
    if x.is_cuda:
        d_sum, d_h = d_sum.contiguous(), d_h.contiguous()
        d_x, d_out, sums = launch_add_norm_gradient(d_sum, d_h, x, stats, bits, scale, weight, n_sums)
        return d_x, d_h.new_empty(0) if d_out is None else d_out, sums
    dh, n = d_h.float().flatten(0, -2), x.float().flatten(0, -2)
    centred, rstd = stats.shape[1] == 2, stats[:, :1]
    n = (n - stats[:, 1:] if centred else n) * rstd
    sums = torch.stack([(dh * n).sum(0), dh.sum(0)])[:n_sums]
    dn = dh if weight is None else dh * weight
    dn = dn - n * (dn * n).mean(-1, keepdim=True) - (dn.mean(-1, keepdim=True) if centred else 0)
    exact = d_sum + (dn * rstd).view(x.shape)
    d_out = exact if bits is None else torch.where(keeps(bits, exact), exact * scale, 0)
    d_out = d_h.new_empty(0) if is_shared(x, d_h, bits) else d_out.to(d_h.dtype)
    return exact.to(x.dtype), d_out, sums.clone()


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, bits, scale, weight, bias, _, _ = inputs
    total, _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(total, stats, bits, weight)
    ctx.scale, ctx.n_sums = scale, 0 if weight is None else 1 if bias is None else 2


def _gradients(ctx: Any, d_sum: Tensor, d_h: Tensor, _: None) -> tuple[Tensor | None, ...]:
    total, stats, bits, weight = ctx.saved_tensors
    d_x, d_out, sums = add_norm_gradient(d_sum, d_h, total, stats, bits, ctx.scale, weight, ctx.n_sums)
    d_out = d_x if is_shared(total, d_h, bits) else d_out
    d_weight, d_bias = (sums[i] if i < ctx.n_sums else None for i in range(2))
    return d_x, d_out, None, None, d_weight, d_bias, None, None


add_norm.register_autograd(_gradients, setup_context=_keep_inputs)


def keeps(bits: Tensor, x: Tensor) -> Tensor:
    """Whether dropout keeps each element of x (B, T, C)."""
    return keep_bits(bits, torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None], x.shape[-1])


@add_norm.register_fake
def _(x: Tensor, out: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, centred = others
    stats = x.new_empty(x.numel() // x.shape[-1], 1 + centred, dtype=torch.float32)
    return x.new_empty(x.shape), out.new_empty(out.shape), stats


@add_norm_gradient.register_fake
def _(d_sum: Tensor, d_h: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, bits, _, _, n_sums = others
    d_out = d_h.new_empty(0 if is_shared(x, d_h, bits) else d_h.shape)
    return x.new_empty(x.shape), d_out, x.new_empty(n_sums, x.shape[-1], dtype=torch.float32)
