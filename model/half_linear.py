"""Linear layers in half precision, by the fastest way to the bits of torch's product.

    y = x w^T        dx = dy w        dw = dy^T x

dw stays torch's: no algorithm that sums in the same order is faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.cublaslt import multiply


def half_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x w^T in the dtype of autocast, for x (..., in) and weight (out, in): (..., out)."""
    dtype = torch.get_autocast_dtype(x.device.type)
    y = product(x.to(dtype).reshape(-1, x.shape[-1]), weight.to(dtype))
    return y.view(*x.shape[:-1], len(weight))


@torch.library.custom_op("gpt::half_product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T for a (M, K) and b (N, K)."""
    return multiply(a, b.T, out=a.new_empty(len(a), len(b)))


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])  # which may be symbols


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad
    return product(d, b.T) if of_a else None, d.T @ a if of_b else None


product.register_autograd(_gradients, setup_context=_keep)
