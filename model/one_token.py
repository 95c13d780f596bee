"""The blocks of a GPT for a single new token, in six kernels each: those of token_kernel.py, and attention's two.

    q, k, v = c_attn(norm(x)), rotated, k and v in the cache
    x = x + c_proj(attend(q))
    h = f(c_fc(norm(x))),  or f(c_gate(norm(x))) c_fc(norm(x))
    x = x + c_proj(h)

and logits = head norm(x). x is in fp32, and so is all within a line; q, k, v, h and attention's output have the
precision of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention import gpu
from attention.gpu import HAS_TRITON
from model.attention import SelfAttention
from model.blocks import Block
from model.cache import Decode
from model.config import Activation, Gate, GPTConfig, NormPlace, Positions
from model.gpt import GPT
from model.loss import capped
from model.mlps import MLP
from model.norms import RMSNorm
from model.positions import PositionTables

if HAS_TRITON:
    from model.token_kernel import Form, Linear, Norm, can_read, launch_product, launch_projection

# The function that the kernels apply to the first of the MLP's products.
FUNCTIONS = {Activation.gelu: "gelu", Activation.geglu: "gelu", Activation.relu2: "relu2", Activation.swiglu: "silu"}


def has_kernels(model: GPT, head: Tensor) -> bool:
    """Whether the kernels can compute this model on its device: of its parts, those that the lines above name.

    head  the matrix (V, C) from the stream to logits
    """
    if not HAS_TRITON or not head.is_cuda or torch.version.hip or gpu.capability(head.device) < (8, 0):
        return False
    config = model.config
    rotates = config.positions is Positions.rotary
    others = (
        config.norm_place is not NormPlace.before, config.qk_norm, config.log_scale, config.gate is not Gate.none,
        config.value_residual, config.value_embeddings > 0, config.head_size % 2 == 1,
        rotates and config.rotated != config.head_size, any(score.formula is not None for score in model.scores),
    )  # fmt: skip
    linears = (module.weight for module in model.h.modules() if isinstance(module, nn.Linear))
    return not any(others) and all(can_read(weight) for weight in (head, *linears))


def through_blocks(model: GPT, x: Tensor, attends: Sequence[Decode], tables: PositionTables) -> Tensor:
    """The residual stream (1, 1, C) after the last block, for the token's stream x before the first, both in fp32.

    tables  for all positions

    x is overwritten.
    """
    block: Any
    for block, attend in zip(model.h, attends, strict=True):
        attention(block, x, attend, tables if block.attn.rotates else PositionTables(), model.config)
        mlp(block, x, model.config)
    return x


def logits(model: GPT, x: Tensor, head: Tensor) -> Tensor:
    """(1, vocab_size) in head's precision, for the stream x (1, 1, C) after the last block."""
    norm, form = norm_of(model.ln_f, head.shape[1])
    y = launch_product(x, norm, Linear(head, None), None, head.new_empty(1, len(head)), form)
    return capped(y[:, : model.vocab_size], model.config.logit_cap)


def attention(block: Block, x: Tensor, attend: Decode, tables: PositionTables, config: GPTConfig) -> None:
    """Add the attention sub-layer's output to the stream x (1, 1, C)."""
    layer: SelfAttention = block.attn
    norm, form = norm_of(block.ln_1, x.shape[-1])
    q = layer.c_attn.weight.new_empty(1, config.n_heads, 1, config.head_size)
    launch_projection(x, norm, linear_of(layer.c_attn), attend.cache, tables, form, q)
    tensors = {tensor.name: getattr(layer, tensor.name) for tensor in layer.score.head_tensors}
    out = attend.attend.decode(q, attend.cache, score=layer.score, scale=layer.scale, **tensors).out
    launch_product(out, None, linear_of(layer.c_proj), None, x, Form(layer.c_proj.in_features, adds=True))


def mlp(block: Block, x: Tensor, config: GPTConfig) -> None:
    """Add the MLP's output to the stream x (1, 1, C)."""
    layer: MLP = block.mlp
    norm, form = norm_of(block.ln_2, x.shape[-1])
    first, second = linear_of(layer.c_fc), None
    if layer.c_gate is not None:
        first, second = linear_of(layer.c_gate), first
    h = first.weight.new_empty(len(first.weight))
    launch_product(x, norm, first, second, h, form._replace(function=FUNCTIONS[config.mlp]))
    launch_product(h, None, linear_of(layer.c_proj), None, x, Form(len(h), adds=True))


def linear_of(layer: nn.Linear) -> Linear:
    """A layer's tensors."""
    return Linear(layer.weight, layer.bias)


def norm_of(norm: nn.Module, width: int) -> tuple[Norm, Form]:
    """A norm's tensors, and the form of a product that begins with it."""
    if isinstance(norm, RMSNorm):
        return Norm(norm.weight, None, norm.eps), Form(width, "rms", norm.plus_one)
    assert isinstance(norm, nn.LayerNorm)
    return Norm(norm.weight, norm.bias, norm.eps), Form(width, "layer")
