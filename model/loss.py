"""Next-token cross-entropy over a vocabulary whose rows are padded for speed.

    loss = mean over i with target_i != -100 of  lse_i - x_{i, target_i}
    x_ij = h_i w_j,      lse_i = log sum_j exp(x_ij),      j < vocab_size
    dx_ij = exp(x_ij - lse_i) - [j = target_i]

A cap c replaces x by c tanh(x / c), and dx by dx (1 - tanh(x / c)^2): Gemma Team 2024, "Gemma 2".

With 50,304 classes the logits x are the largest tensor of a step: 6 GiB in fp32 for 32,768 tokens, and autograd keeps
several such tensors. `chunked` takes some rows of h at a time, turns their logits into dx in place, and keeps only
dx w and dx^T h. No more than one chunk of logits ever exists. Computing the gradients in the forward pass is the idea
of Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024).
"""

from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.gpu import HAS_TRITON

IGNORE_INDEX = -100

# Rows of logits that exist at once. dx w is as narrow as the model: with 768 channels these rows make 44 x 3 tiles of
# 128 x 256, one for each of the 132 multiprocessors of an H100 SXM or H200.
CHUNK_ROWS = 5632
# Fewer classes than this make logits no larger than a block's activations, and plain code is as fast.
LARGE_VOCABULARY = 8192


class LossKind(Enum):
    """How the loss over the vocabulary is computed."""

    auto = "auto"  # chunked on a GPU for vocabularies of 8,192 tokens and more, else plain
    plain = "plain"  # all logits in memory, in fp32
    chunked = "chunked"  # the logits of 5,632 tokens at a time, in the precision of the matrix products


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """c tanh(x / c) of logits x; x without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    kind: LossKind,
    chunk_rows: int = CHUNK_ROWS,
    cap: float | None = None,
    count: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of the next token, a scalar in fp32.

    hidden      (..., C)   after the final norm
    weight      (V, C)     V >= vocab_size rows; those beyond it never enter the softmax
    targets     (...)      int64; -100 is left out of the mean
    chunk_rows  rows of logits that `chunked` holds at once
    cap         of the logits; None: no cap
    count       0-dim, divides the sum instead of the number of targets
    """
    if kind is LossKind.auto:
        kind = LossKind.chunked if hidden.is_cuda and vocab_size >= LARGE_VOCABULARY else LossKind.plain
    if kind is LossKind.plain:
        logits = capped(F.linear(hidden, weight)[..., :vocab_size].float(), cap)
        reduction = "mean" if count is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
        return loss if count is None else loss / count

    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, _, _ = chunked_cross_entropy(
        hidden.flatten(0, -2), weight, targets.flatten(), vocab_size, with_gradients, chunk_rows, cap
    )
    return total / ((targets != IGNORE_INDEX).sum() if count is None else count)


@torch.library.custom_op("gpt::chunked_cross_entropy", mutates_args=())
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    with_gradients: bool,
    chunk_rows: int,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross-entropy of hidden (N, C), in whose dtype the products are taken, and its gradients.

    The weight (V, C) is cast here, so that its gradient never passes through a narrower type.

    Returns the sum, a scalar in fp32; d_hidden (N, C) in hidden's dtype; d_weight (V, C) in fp32. Without gradients
    the latter two are empty.
    """
    N, V = len(hidden), len(weight)
    rows = min(N, chunk_rows)
    losses = hidden.new_empty(N, dtype=torch.float32)
    d_hidden = torch.empty_like(hidden) if with_gradients else hidden.new_empty(0)
    d_weight = weight.new_zeros(weight.shape if with_gradients else 0, dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(hidden.dtype)
        buffer = hidden.new_empty(rows, V)
        for start in range(0, N, rows):
            chunk = slice(start, min(start + rows, N))
            h = hidden[chunk]
            x = torch.mm(h, w.T, out=buffer[: len(h)])
            losses[chunk] = softmax_gradient_(x, targets[chunk], vocab_size, cap)
            if with_gradients:
                torch.mm(x, w, out=d_hidden[chunk])
                add_product_(d_weight, x.T, h)
    return losses.sum(), d_hidden, d_weight


@chunked_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, with_gradients: bool, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden = torch.empty_like(hidden) if with_gradients else hidden.new_empty(0)
    d_weight = weight.new_empty(weight.shape if with_gradients else 0, dtype=torch.float32)
    return hidden.new_empty((), dtype=torch.float32), d_hidden, d_weight


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, d_hidden, d_weight = output
    ctx.mark_non_differentiable(d_hidden, d_weight)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(d_hidden, d_weight)


def _scale_gradients(ctx: Any, upstream: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    d_hidden, d_weight = ctx.saved_tensors
    return (d_hidden * upstream).to(d_hidden.dtype), d_weight * upstream, None, None, None, None, None


chunked_cross_entropy.register_autograd(_scale_gradients, setup_context=_keep_gradients)


def softmax_gradient_(x: Tensor, targets: Tensor, vocab_size: int, cap: float | None = None) -> Tensor:
    """Turn logits (rows, V) into the gradient of their summed loss, in place; returns the losses (rows,) in fp32.

    cap  of the logits, which are given without it
    """
    if x.is_cuda and HAS_TRITON:
        from model.softmax_kernel import launch_softmax_gradient

        return launch_softmax_gradient(x, targets, vocab_size, cap)
    logits = capped(x[:, :vocab_size].float(), cap)
    counted = (targets != IGNORE_INDEX)[:, None]  # (rows, 1)
    target = targets[:, None].clamp(min=0)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    losses = (lse - logits.gather(1, target)) * counted
    dx = (logits - lse).exp_().scatter_add_(1, target, -torch.ones_like(lse)) * counted
    if cap is not None:
        dx *= 1 - (logits / cap).square()
    x[:, :vocab_size] = dx.to(x.dtype)
    x[:, vocab_size:] = 0
    return losses[:, 0]


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b in fp32, whatever the dtype of a and b."""
    if total.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
