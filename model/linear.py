"""Linear layers whose products in fp32 on a CPU may come from oneDNN.

    y = x w^T + b        dx = dy w        dw = dy^T x        db = sum of dy over the rows

torch takes such products from its BLAS, which in its packages for x86 is MKL. On AMD's processors with AVX-512 MKL is
half as fast as oneDNN, another library of these packages. The two round differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Products(Enum):
    """The library of the linear layers' products in fp32 on a CPU."""

    blas = "blas"
    onednn = "onednn"


class _Setting:
    """Of this process, as torch's number of threads is."""

    onednn = False


@contextmanager
def products_by(library: Products) -> Iterator[None]:
    """Within the block, linear layers take their products in fp32 on a CPU from this library."""
    before, _Setting.onednn = _Setting.onednn, library is Products.onednn
    try:
        yield
    finally:
        _Setting.onednn = before


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w^T + b for x (..., in), weight (out, in), bias (out,): (..., out)."""
    if not _Setting.onednn or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32:
        return F.linear(x, weight, bias)
    y = product(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@torch.library.custom_op("gpt::onednn_product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in fp32 by oneDNN, for a (M, K) and b (N, K) of any strides."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(len(a), len(b))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad
    return product(d, b.T) if of_a else None, product(d.T, a.T) if of_b else None


product.register_autograd(_gradients, setup_context=_keep)
