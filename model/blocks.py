"""The blocks of a GPT: attention and MLP, each normalised on the way in and added to the residual stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from attention.interface import AttentionOutput
from attention.score import Layout, Score
from attention.scores.alibi import alibi_slopes
from model.config import GPTConfig
from model.dropout import Mask, drop
from model.fused_mlp import can_fuse, fused_mlp
from model.score import ScoreConfig
from model.score_tensors import ScoreTensors

ROTARY_BASE = 10_000.0

Rotation = tuple[Tensor, Tensor]  # cos and sin of each position's angles, (T, D / 2) or (B, T, D / 2) each
Attend = Callable[..., AttentionOutput]  # an Attention, or what calls one with a cache
Masks = Sequence[Mask | None]  # residual dropout's mask at each site; None: keep all


def rotation_table(seq_len: int, head_dim: int) -> Rotation:
    """Angles m * base^(-2i / D) of position m and channel pair i: Su et al. 2021, "RoFormer", eq. 15."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2) / head_dim)  # (D / 2,)
    angles = torch.outer(torch.arange(seq_len), frequencies)  # (T, D / 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + D / 2) of each head's channels by their position's angles: (B, T, H, D) in and out."""
    cos, sin = (r.unsqueeze(-2) for r in rotation)  # (T, 1, D / 2)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def call(recompute: bool, function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """function(*inputs), storing only the inputs for the backward pass if `recompute`."""
    return checkpoint(function, *inputs, use_reentrant=False) if recompute else function(*inputs)


def labelled(name: str) -> AbstractContextManager[object]:
    """Name a part of the step for a profiler. The compiler does not see it, as it fuses across such borders."""
    return nullcontext() if torch.compiler.is_compiling() else record_function(name)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) in the tanh approximation: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2.

    (1 + tanh(u)) / 2 is the logistic function of 2 u, for which the compiler generates faster code
    (docs/notes/training-step.md).
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


class SelfAttention(nn.Module):
    """Fused projection to queries, keys and values; the given attention; projection back."""

    slopes: Tensor | None  # (H,), with ALiBi only
    sinks: Tensor | None  # (H,), learned, with sinks only

    def __init__(self, config: GPTConfig, score: Score, options: ScoreConfig) -> None:
        """options: where the tensors of the score's formula come from."""
        super().__init__()
        self.score = score
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads or config.n_heads
        self.head_dim = config.n_embd // config.n_heads
        self.c_attn = nn.Linear(config.n_embd, (self.n_heads + 2 * self.n_kv_heads) * self.head_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        # Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters"; OLMo 2
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=1e-6) for _ in range(2))
        self.register_buffer("slopes", alibi_slopes(self.n_heads) if score.alibi else None, persistent=False)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(self.n_heads)) if score.sinks else None)
        self.formula: ScoreTensors | None = None
        if score.formula is not None:
            self.formula = ScoreTensors(score, options.learned, options.tensors, config.n_embd, self.n_heads)

    def forward(
        self, x: Tensor, rotation: Rotation | None, layout: Layout, attend: Attend, key: Tensor | None
    ) -> Tensor:
        """x (B, T, C) to (B, T, C); the rest as in `Block.forward`."""
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, -1, self.head_dim)  # (B, T, H + 2 H_kv, D)
        q, k, v = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        if self.qk_norm:  # in the weights' dtype: torch fuses no norm of two dtypes, and warns
            dtype = self.q_norm.weight.dtype
            q, k = self.q_norm(q.to(dtype)).to(v.dtype), self.k_norm(k.to(dtype)).to(v.dtype)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        # Views: an attention takes any strides, so nothing is copied on the way in.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, H_kv, T, D) twice
        tensors = {"slopes": self.slopes, "sinks": self.sinks}
        if self.formula is not None:
            tensors |= self.formula(x)
        with labelled("attention"):
            out = attend(q, k, v, score=self.score, layout=layout, dropout_key=key, **tensors).out  # (B, H, T, D)
        return self.c_proj(out.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers with GPT-2's GELU between them, four times as wide as the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) to (..., C)."""
        if can_fuse(x, self.c_fc.out_features):
            return fused_mlp(x, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias)
        return self.c_proj(gelu(self.c_fc(x)))


class Block(nn.Module):
    """Two sub-layers, each with a norm before and dropout after, added to the stream."""

    def __init__(self, config: GPTConfig, score: Score, options: ScoreConfig, recompute_attention: bool) -> None:
        super().__init__()
        self.recompute_attention = recompute_attention
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = SelfAttention(config, score, options)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        layout: Layout,
        attend: Attend,
        key: Tensor | None,
        masks: Masks,
    ) -> Tensor:
        """The residual stream x (B, T, C) after this block.

        rotation  angles of the tokens' positions; None without rotary positions
        layout    of the documents
        attend    called with q (B, H, T, D) and k, v (B, H_kv, T, D)
        key       packed, of dropout on attention weights; None drops nothing
        masks     of residual dropout, after attention and after the MLP
        """

        def attention(x: Tensor) -> Tensor:
            return drop(self.attn(self.ln_1(x), rotation, layout, attend, key), masks[0])

        x = x + call(self.recompute_attention, attention, x)
        return x + drop(self.mlp(self.ln_2(x)), masks[1])
