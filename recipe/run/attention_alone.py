"""The memory of the attention alone, without the model around it."""

from __future__ import annotations

import torch
from torch import Tensor

from attention import Attention, AttentionShape, DropoutKey, Layout, documents
from attention.check.memory import AllocationMeter


def attention_peak(attend: Attention, shape: AttentionShape, B: int, T: int) -> int:
    """Bytes that a forward and backward pass of `attend` over B sequences of T tokens takes at its peak, above q, k, v
    and the output's gradient: saved tensors, workspace, output and gradients.

    The score is the first layer's, and dropout is as `attend` was configured. Leaves the generators alone.
    """
    score, generator = shape.scores[0], torch.Generator(shape.device).manual_seed(0)

    def random(heads: int) -> Tensor:
        x = torch.randn(B, heads, T, shape.head_dim, generator=generator, device=shape.device)
        return x.to(shape.dtype).requires_grad_()

    q, k, v = random(shape.n_heads), random(shape.n_kv_heads), random(shape.n_kv_heads)
    do = torch.ones_like(q)
    learned = [tensor.name for tensor in score.head_tensors if tensor.learned]
    tensors = {name: torch.zeros(shape.n_heads, device=shape.device, requires_grad=True) for name in learned}
    starts = torch.zeros(B, T, dtype=torch.int32, device=shape.device)
    layout = documents(starts) if shape.documents else Layout()
    key = DropoutKey(seed=0, step=0, layer=0, first_sequence=0)
    with torch.random.fork_rng(devices=[]), AllocationMeter() as meter:
        out = attend(q, k, v, score=score, layout=layout, dropout_key=key, tensors=tensors).out
        torch.autograd.grad(out, (q, k, v), do)
    return meter.peak
