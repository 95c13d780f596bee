"""The attention sub-layer: projections, norms and rotations around the attention that the model is given; and a layer
of linear attention (mixers/layers.py) in its place.

    q, k, v = c_attn(x)
    q, k = norm(q), norm(k)                              qk_norm
    q, k = rotated by the angles of their positions      positions=rotary
    v = w_0 v + w_1 v_first + w_2 embedding              value_residual, value_embeddings
    out = attend(q, k, v)
    out = sigmoid(c_gate(x)) out                         gate
    c_proj(out)

QK norm: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters". Gate: Qiu et al. 2025, "Gated
Attention for Large Language Models". v_first are the first layer's values: Zhou et al. 2024, "Value Residual Learning";
the embedding of the token for this layer's values: modded-nanogpt (Jordan et al. 2024). The weights w begin equal.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from attention.layout import Layout
from attention.score import Score
from mixers.layers import LinearAttention, Mamba2, MixerState, build_mixer
from model.fused_rotation import can_fuse_rotation, norm_and_rotate
from model.linear import Linear
from model.norms import QK_EPS, RMSNorm
from model.options import AttentionBias, Gate, GPTConfig, NormOver
from model.positions import PositionTables, has_rotation
from model.score import ScoreConfig
from model.score_tensors import ScoreTensors

# An Attention, or a function that calls one with a cache, which give an AttentionOutput; or a mixer's Carry.
Attend = Callable[..., Any]


class Surroundings(NamedTuple):
    """The inputs of a layer besides the residual stream.

    positions     rows of the tokens
    layout        of the documents
    attend        called with q (B, H, T, D) and k, v (B, H_kv, T, D)
    key           packed, of dropout on attention weights; None drops nothing
    first_values  (B, T, H_kv, D) of the first layer, for those after it in a model with value_residual
    embedding     (B, T, H_kv D) of the tokens, for layers with value embeddings
    """

    positions: PositionTables
    layout: Layout
    attend: Attend
    key: Tensor | None = None
    first_values: Tensor | None = None
    embedding: Tensor | None = None


def labelled(name: str) -> AbstractContextManager[object]:
    """Name a part of the step for a profiler. The compiler does not see it, as it fuses across such borders."""
    return nullcontext() if torch.compiler.is_compiling() else record_function(name)


class SelfAttention(nn.Module):
    """Fused projection to queries, keys and values; the model's attention; projection back."""

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    value_weights: Tensor | None  # of this layer's values, the first layer's and the embedding, as far as there are

    def __init__(self, config: GPTConfig, score: Score, options: ScoreConfig, layer: int) -> None:
        """options: where the tensors of the score's formula come from."""
        super().__init__()
        self.score, self.rotates = score, has_rotation(config, layer)
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.kv_heads, config.head_size
        self.scale = None if config.scale_dim is None else config.scale_dim**-0.5
        width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        of_inputs = config.bias or config.attention_bias is not AttentionBias.none
        of_output = config.bias or config.attention_bias is AttentionBias.all
        self.c_attn = Linear(config.n_embd, width + 2 * kv_width, bias=of_inputs)
        self.c_proj = Linear(width, config.n_embd, bias=of_output)
        self.q_norm = self.k_norm = None
        self.over_width = config.qk_norm_over is NormOver.width
        if config.qk_norm:
            eps = config.norm_eps or QK_EPS
            widths = (width, kv_width) if self.over_width else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (RMSNorm(width, eps, config.norm_scale) for width in widths)
        self.mixes_first = config.value_residual and layer > 0
        mixed = 1 + self.mixes_first + (config.value_table(layer) is not None)
        weights = nn.Parameter(torch.full((mixed,), 1 / mixed)) if mixed > 1 else None
        self.register_parameter("value_weights", weights)
        self.c_gate = None
        if config.gate is not Gate.none:
            self.c_gate = Linear(config.n_embd, self.n_heads if config.gate is Gate.head else width, bias=config.bias)
        for tensor in score.head_tensors:
            values = tensor.initial(self.n_heads, None)
            if tensor.learned:
                self.register_parameter(tensor.name, nn.Parameter(values))
            else:
                self.register_buffer(tensor.name, values, persistent=False)
        self.formula: ScoreTensors | None = None
        if score.formula is not None:
            self.formula = ScoreTensors(score, options.learned, options.tensors, config.n_embd, self.n_heads)

    @property
    def reads_exactly(self) -> bool:
        """Whether the input's precision matters: products round it, and tensors of the score may not."""
        return self.formula is not None and len(self.formula.made) > 0

    def fill_fixed_tensors(self) -> None:
        """Write the tensors of the score that are not learned, after a move from the meta device."""
        for tensor in self.score.head_tensors:
            if not tensor.learned:
                getattr(self, tensor.name).copy_(tensor.initial(self.n_heads, None))

    def forward(self, x: Tensor, around: Surroundings) -> tuple[Tensor, Tensor]:
        """x (B, T, C) to (B, T, C); and this layer's values (B, T, H_kv, D), before others are mixed in."""
        B, T, _ = x.shape
        heads = self.c_attn(x).view(B, T, -1, self.head_dim)  # (B, T, H + 2 H_kv, D)
        q, k, values = heads.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=2)
        q, k = self.prepared(q, self.q_norm, around.positions), self.prepared(k, self.k_norm, around.positions)
        v = self.mixed(values, around)
        # Views: an attention takes any strides, so nothing is copied on the way in.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, H_kv, T, D) twice
        tensors = {tensor.name: getattr(self, tensor.name) for tensor in self.score.head_tensors}
        score = self.score
        if self.formula is not None:
            score, of_formula = self.formula(x)
            tensors |= of_formula
        given = {"score": score, "layout": around.layout, "scale": self.scale, "dropout_key": around.key}
        with labelled("attention"):
            out = around.attend(q, k, v, **given, **tensors).out  # (B, H, T, D)
        out = out.transpose(1, 2)
        if self.c_gate is not None:
            out = out * torch.sigmoid(aligned_linear(x, self.c_gate)).view(B, T, self.n_heads, -1).to(out.dtype)
        return self.c_proj(out.reshape(B, T, -1)), values

    def prepared(self, x: Tensor, norm: RMSNorm | None, positions: PositionTables) -> Tensor:
        """Queries or keys x (B, T, heads, D), normalised, each head's or all channels together, and rotated."""
        cos, sin = positions.cos, positions.sin
        if norm is not None and self.rotates and not self.over_width and can_fuse_rotation(x, cos):
            assert cos is not None
            assert sin is not None
            return norm_and_rotate(x, norm.scale(), cos, sin, norm.eps)
        if norm is not None:
            x = (norm(x.flatten(-2)).view_as(x) if self.over_width else norm(x)).to(x.dtype)
        return positions.rotate(x) if self.rotates else x

    def mixed(self, v: Tensor, around: Surroundings) -> Tensor:
        """The values (B, T, H_kv, D) that this layer attends to."""
        if self.value_weights is None:
            return v
        weights = self.value_weights.to(v.dtype)
        others = []
        if self.mixes_first:
            assert around.first_values is not None
            others.append(around.first_values)
        if around.embedding is not None:
            others.append(around.embedding.view_as(v).to(v.dtype))
        return sum((w * x for w, x in zip(weights[1:], others, strict=True)), weights[0] * v)


def aligned_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """linear(x), in a product with as many further columns as make rows of whole 16 bytes, which GPUs are built for."""
    missing = -linear.out_features % 8
    if not missing or not x.is_cuda:
        return linear(x)
    bias = None if linear.bias is None else F.pad(linear.bias, (0, missing))
    return F.linear(x, F.pad(linear.weight, (0, 0, 0, missing)), bias)[..., : linear.out_features]


@dataclass(frozen=True)
class Carry:
    """A mixer's call that goes on from stored states and stores the new ones, in the place of an attention's call.

    state  of the sequence in each slot
    fresh  (slots,) whether x (1, T, C) is the slot's new prompt; None: x (slots, 1, C) has each slot's next token
    """

    state: MixerState
    fresh: Tensor | None = None

    def __call__(self, mixer: LinearAttention | Mamba2, x: Tensor) -> Tensor:
        out, after = mixer(x, state=self.state if self.fresh is None else None)
        for stored, new in zip(self.state, after, strict=True):
            if stored is None:
                continue
            if self.fresh is not None:
                new = torch.where(self.fresh.view(-1, *[1] * (stored.ndim - 1)), new.to(stored.dtype), stored)
            stored.copy_(new)
        return out


class MixerLayer(nn.Module):
    """A mixer, called as SelfAttention is. It has no positions and no score, and drops no weights."""

    reads_exactly = False

    def __init__(self, config: GPTConfig, name: str) -> None:
        super().__init__()
        self.mixer = build_mixer(name, config.n_embd, config.n_heads, config.mixer.value)

    def forward(self, x: Tensor, around: Surroundings) -> tuple[Tensor, None]:
        """x (B, T, C) to (B, T, C). A document begins with nothing before it."""
        with labelled("attention"):
            if isinstance(around.attend, Carry):
                return around.attend(self.mixer, x), None
            return self.mixer(x, around.layout.document_starts)[0], None
