"""GPT-2's MLP without separate passes for GELU, which is applied while a matrix product is written.

    h = x W1^T,   g = GELU(h),   y = g W2^T
    dh = (dy W2) GELU'(h),   dW2 = dy^T g,   dW1 = dh^T x,   dx = dh W1

A kernel between two products reads and writes the MLP's largest tensor, (tokens, 4 C), twice each in both passes. The
first product of a line now writes h and g, or dh. Biases are added where they are given.

With in_fp8 the products of the first line round x, W1, g and W2 to e4m3, of 4 significant bits, and the second line is
as before, with g as rounded. Micikevicius et al. 2022, "FP8 Formats for Deep Learning". Scales are constants: a norm
precedes the MLP, and e4m3 keeps its precision from 2^-6 to 448. So nothing is measured, stored or agreed among ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cublaslt import DGELU, GELU_AUX, GELU_AUX_BIAS, PLAIN, aligned, has_fast_products, multiply_then

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
WEIGHTS_SCALE = 32.0  # of weights in e4m3: precise from 2^-11 to 14


def fused_mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, in_fp8: bool = False) -> Tensor:
    """c_proj(GELU(c_fc(x))): x (..., C) to (..., C), in the dtype of autocast.

    w1 (4 C, C), b1 (4 C,) of c_fc; w2 (C, 4 C), b2 (C,) of c_proj; GELU in the tanh approximation
    in_fp8  compute both products in e4m3; autocast's dtype must be bf16, and channels multiples of 16. b2 is added to
            the second one as rounded
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, w1, w2 = x.to(dtype), w1.to(dtype), w2.to(dtype)
        b1, b2 = None if b1 is None else b1.to(dtype), None if b2 is None else b2.to(dtype)
    with torch.autocast(kind, enabled=False):
        return FusedMLP.apply(x.reshape(-1, x.shape[-1]), w1, b1, w2, b2, in_fp8).view(*x.shape[:-1], len(w2))


class FusedMLP(torch.autograd.Function):
    """The two lines above, for x (N, C)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, in_fp8: bool
    ) -> Tensor:
        """y (N, C)"""
        if in_fp8:
            g, h = linear_gelu_in_fp8(rounded(x), rounded(w1, WEIGHTS_SCALE), b1)
            y = linear_in_fp8(g, rounded(w2, WEIGHTS_SCALE))
            y = y if b2 is None else y + b2
        else:
            g, h = linear_gelu(x, w1, b1)
            y = F.linear(g, w2, b2)
        ctx.save_for_backward(x, w1, w2, g, h)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, w1, b1, w2 and b2."""
        x, w1, w2, g, h = ctx.saved_tensors
        of_x, of_w1, of_b1, of_w2, of_b2, _ = ctx.needs_input_grad
        dw2, db2 = dy.T @ g.to(dy.dtype) if of_w2 else None, dy.sum(0) if of_b2 else None
        if not (of_x or of_w1 or of_b1):
            return None, None, None, dw2, db2, None
        dh = gelu_gradient(dy.contiguous(), w2, h)
        dx, dw1, db1 = dh @ w1 if of_x else None, dh.T @ x if of_w1 else None, dh.sum(0) if of_b1 else None
        return dx, dw1, db1, dw2, db2, None


def rounded(x: Tensor, scale: float = 1.0) -> Tensor:
    """x times a power of two, rounded to e4m3; what is beyond its largest number becomes that."""
    if x.dtype is torch.bfloat16 and torch.compiler.is_compiling():
        # The compiler skips a rounding to bf16 unless its bits are read; weights that ranks exchange have it.
        x = (x.view(torch.int16) & -1).view(torch.bfloat16)
    return (x * scale).clamp(-LARGEST, LARGEST).to(E4M3)


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


@torch.library.custom_op("gpt::linear_gelu_in_fp8", mutates_args=())
def linear_gelu_in_fp8(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU(h) in e4m3 and h = x weight^T / WEIGHTS_SCALE + bias in bf16, both (N, width).

    x (N, C) and weight (width, C) in e4m3, bias (width,) in bf16
    """
    if not has_fast_products(x.device):
        exact = F.linear(x.float(), weight.float() / WEIGHTS_SCALE, None if bias is None else bias.float())
        return rounded(F.gelu(exact, approximate="tanh")), exact.bfloat16()
    g, h = (x.new_empty(len(x), len(weight), dtype=dtype) for dtype in (E4M3, torch.bfloat16))
    epilogue = GELU_AUX if bias is None else GELU_AUX_BIAS
    multiply_then(epilogue, aligned(x), aligned(weight).T, g, h, bias, scale=1 / WEIGHTS_SCALE)
    return g, h


@torch.library.custom_op("gpt::linear_in_fp8", mutates_args=())
def linear_in_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T / WEIGHTS_SCALE, (N, C), in bf16, of x (N, width) and weight (C, width) in e4m3."""
    if not has_fast_products(x.device):
        return F.linear(x.float(), weight.float() / WEIGHTS_SCALE).bfloat16()
    y = x.new_empty(len(x), len(weight), dtype=torch.bfloat16)
    multiply_then(PLAIN, aligned(x), aligned(weight).T, y, scale=1 / WEIGHTS_SCALE)
    return y


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@linear_gelu_in_fp8.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    g, h = (x.new_empty(x.shape[0], weight.shape[0], dtype=dtype) for dtype in (E4M3, torch.bfloat16))
    return g, h


@linear_in_fp8.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)


@gelu_gradient.register_fake
def _(dy: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return torch.empty_like(h)


def gelu_derivative(h: Tensor) -> Tensor:
    """GELU'(h) = s + h s (1 - s) 2 u', with s = sigmoid(2 u) and u = sqrt(2 / pi) (h + 0.044715 h^3)."""
    scale, cubic = math.sqrt(8 / math.pi), 0.044715
    s = torch.sigmoid(scale * (h + cubic * h**3))
    return s + h * s * (1 - s) * scale * (1 + 3 * cubic * h**2)
