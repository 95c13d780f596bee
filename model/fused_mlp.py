"""GPT-2's MLP without separate passes for GELU, which is applied while a matrix product is written.

    h = x W1^T,   g = GELU(h),   y = g W2^T
    dh = (dy W2) GELU'(h),   dW2 = dy^T g,   dW1 = dh^T x,   dx = dh W1

A kernel between two products reads and writes the MLP's largest tensor, (tokens, 4 C), twice each in both passes. The
first product of a line now writes h and g, or dh. Biases are added where there are any.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cublaslt import DGELU, GELU_AUX, GELU_AUX_BIAS, HALF, aligned, has_fast_products, multiply_then


def is_trained_in_half(x: Tensor, width: int) -> bool:
    """Whether these products are faster for x (..., C) and a layer from C to `width` channels.

    True in training, in half precision, on GPUs on which it was measured, if rows begin at multiples of 16 bytes.
    """
    return (
        torch.is_grad_enabled()
        and has_fast_products(x.device)  # first: of other devices torch may not know whether autocast is on
        and torch.is_autocast_enabled(x.device.type)
        and torch.get_autocast_dtype(x.device.type) in HALF
        and x.shape[-1] % 8 == 0
        and width % 8 == 0
    )


def fused_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
    """c_proj(GELU(c_fc(x))): x (..., C) to (..., C), in the dtype of autocast.

    w1 (4 C, C), b1 (4 C,) of c_fc; w2 (C, 4 C), b2 (C,) of c_proj; GELU in the tanh approximation
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, w1, w2 = x.to(dtype), w1.to(dtype), w2.to(dtype)
        b1, b2 = None if b1 is None else b1.to(dtype), None if b2 is None else b2.to(dtype)
    with torch.autocast(kind, enabled=False):
        return FusedMLP.apply(x.reshape(-1, x.shape[-1]), w1, b1, w2, b2).view(*x.shape[:-1], len(w2))


class FusedMLP(torch.autograd.Function):
    """The two lines above, for x (N, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        """y (N, C)"""
        g, h = linear_gelu(x, w1, b1)
        ctx.save_for_backward(x, w1, w2, g, h)
        return F.linear(g, w2, b2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, w1, b1, w2 and b2."""
        x, w1, w2, g, h = ctx.saved_tensors
        of_x, of_w1, of_b1, of_w2, of_b2 = ctx.needs_input_grad
        dw2, db2 = dy.T @ g if of_w2 else None, dy.sum(0) if of_b2 else None
        if not (of_x or of_w1 or of_b1):
            return None, None, None, dw2, db2
        dh = gelu_gradient(dy.contiguous(), w2, h)
        dx, dw1, db1 = dh @ w1 if of_x else None, dh.T @ x if of_w1 else None, dh.sum(0) if of_b1 else None
        return dx, dw1, db1, dw2, db2


@torch.library.custom_op("gpt::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU(h) and h = x weight^T + bias, both (N, width), of x (N, C), weight (width, C) and bias (width,)."""
    if not has_fast_products(x.device):
        h = F.linear(x, weight, bias)
        return F.gelu(h, approximate="tanh"), h
    g, h = (x.new_empty(len(x), len(weight)) for _ in range(2))
    multiply_then(GELU_AUX if bias is None else GELU_AUX_BIAS, aligned(x), aligned(weight).T, g, h, bias)
    return g, h


@torch.library.custom_op("gpt::gelu_gradient", mutates_args=())
def gelu_gradient(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """(dy weight) GELU'(h), (N, width), of dy (N, C), weight (C, width) and h (N, width)."""
    if not has_fast_products(dy.device):
        exact = h.to(torch.promote_types(h.dtype, torch.float32))
        return ((dy @ weight) * gelu_derivative(exact)).to(h.dtype)
    dh = torch.empty_like(h)
    multiply_then(DGELU, aligned(dy), aligned(weight), dh, h)
    return dh


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@gelu_gradient.register_fake
def _(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return torch.empty_like(h)


def gelu_derivative(h: Tensor) -> Tensor:
    """GELU'(h) = s + h s (1 - s) 2 u', with s = sigmoid(2 u) and u = sqrt(2 / pi) (h + 0.044715 h^3)."""
    scale, cubic = math.sqrt(8 / math.pi), 0.044715
    s = torch.sigmoid(scale * (h + cubic * h**3))
    return s + h * s * (1 - s) * scale * (1 + 3 * cubic * h**2)
