"""QK norm and rotary positions of queries and keys in one pass, where the compiler would take several.

    n = x / sqrt(mean(x^2) + eps),   (y1, y2) = (n1 w1 cos - n2 w2 sin, n2 w2 cos + n1 w1 sin)
    (d1, d2) = (dy1 cos + dy2 sin, dy2 cos - dy1 sin),   dw = sum d n,   dx = (d w - n mean(d w n)) / sqrt(...)

with x's first and second half as 1 and 2. Heads are short rows, for which the compiler's kernels take three to five
times as long as reading and writing do (docs/notes/training-step.md).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.gpu import HAS_TRITON
from attention.precision import accum_dtype

if HAS_TRITON:
    from model.rotation_kernel import PAIRS, launch_rotate, launch_rotate_gradient

    PROGRAM = PAIRS.value  # a number, which the compiler can trace


def can_fuse_rotation(x: Tensor, cos: Tensor | None) -> bool:
    """Whether `norm_and_rotate` is faster for queries or keys x (B, T, H, D), all of whose channels rotate by `cos`.

    True in training on a GPU, if D is a power of two and the tokens fill the kernels' programs.
    """
    if not (torch.is_grad_enabled() and x.is_cuda and HAS_TRITON) or x.dtype == torch.float64:
        return False
    B, T, _, D = x.shape
    fills = 16 <= D <= 256 and D & (D - 1) == 0 and B * T * D % (2 * PROGRAM) == 0
    return fills and cos is not None and 2 * cos.shape[-1] == D


def norm_and_rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Queries or keys x (B, T, H, D), normalised and rotated, in x's dtype.

    weight    (D,) of the norm; None: 1
    cos, sin  (T, D / 2) or (B, T, D / 2), of the tokens' angles
    """
    return NormAndRotate.apply(x, weight, cos, sin, eps)


class NormAndRotate(torch.autograd.Function):
    """The lines above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return normed_rotation(x, weight, cos, sin, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        dx, dw = normed_rotation_gradient(dy, x, weight, cos, sin, ctx.eps)
        return dx, None if weight is None else dw.to(weight.dtype), None, None, None


@torch.library.custom_op("gpt::normed_rotation", mutates_args=())
def normed_rotation(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """y (B, T, H, D), contiguous."""
    if x.is_cuda:
        return launch_rotate(x, weight, cos, sin, eps)
    n1, n2 = F.rms_norm(x.to(accum_dtype(x.dtype)), x.shape[-1:], weight, eps).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([n1 * cos - n2 * sin, n2 * cos + n1 * sin], dim=-1).to(x.dtype)


@torch.library.custom_op("gpt::normed_rotation_gradient", mutates_args=())
def normed_rotation_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """dx (B, T, H, D), contiguous, and dw (D,), which is empty where there is no weight."""
    if x.is_cuda:
        return launch_rotate_gradient(dy, x, weight, cos, sin, eps)
    exact, d1, d2 = x.to(accum_dtype(x.dtype)), *dy.to(accum_dtype(x.dtype)).chunk(2, dim=-1)
    r = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    n, cos, sin = exact * r, cos.unsqueeze(-2), sin.unsqueeze(-2)
    d = torch.cat([d1 * cos + d2 * sin, d2 * cos - d1 * sin], dim=-1)
    dw = n.new_empty(0) if weight is None else (d * n).sum((0, 1, 2))
    d = d if weight is None else d * weight
    return ((d - n * (d * n).mean(-1, keepdim=True)) * r).to(x.dtype).contiguous(), dw


normed_rotation.register_fake(lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device))


@normed_rotation_gradient.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    dw = x.new_empty(0 if weight is None else len(weight), dtype=accum_dtype(x.dtype))
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), dw
