"""Token lookup whose gradient is the same bits every time.

A compiled lookup's gradient becomes atomic additions, and their order changes from run to run where a token occurs more
than once. torch's eager kernel sorts the tokens and adds in order; as a custom operator it survives compilation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("gpt::lookup_gradient", mutates_args=())
def lookup_gradient(d_out: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """(rows, C): for each row, the sum of d_out (..., C) over the places where tokens (...) refer to it."""
    return torch.ops.aten.embedding_dense_backward(d_out, tokens, rows, -1, False)


lookup_gradient.register_fake(lambda d_out, _, rows: d_out.new_empty(rows, d_out.shape[-1]))


class Lookup(torch.autograd.Function):
    """weight[tokens]"""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        return lookup_gradient(d_out, tokens, ctx.rows), None


def lookup(weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of weight (V, C) for tokens (...) int64: (..., C)."""
    if weight.is_cuda or torch.compiler.is_compiling():
        return Lookup.apply(weight, tokens)
    return F.embedding(tokens, weight)  # eager: torch's gradient is deterministic, and cheaper for a small model
