"""The block of a GPT: attention and MLP, each with its norm, added to the residual stream.

    x = x + attention(norm(x))             norm_place=before: Radford et al. 2019, GPT-2
    x = x + norm(attention(x))             after: OLMo Team 2024, "2 OLMo 2 Furious"
    x = x + norm(attention(norm(x)))       both: Gemma Team 2024, "Gemma 2"

and the same with the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attention.score import Score
from model.attention import SelfAttention, Surroundings
from model.config import GPTConfig, NormPlace
from model.dropout import Mask, drop
from model.mlps import MLP
from model.norms import build_norm
from model.score import ScoreConfig

Masks = Sequence[Mask | None]  # residual dropout's mask at each site; None: keep all
T = TypeVar("T")


def call(recompute: bool, function: Callable[..., T], *inputs: object) -> T:
    """function(*inputs), storing only the inputs for the backward pass if `recompute`."""
    return checkpoint(function, *inputs, use_reentrant=False) if recompute else function(*inputs)


def added(x: Tensor, out: Tensor) -> Tensor:
    """The stream x with a sub-layer's output, which a norm may have left in a higher precision."""
    return (x + out).to(x.dtype)


class Block(nn.Module):
    """Two sub-layers, each with its norm and with dropout after it, added to the stream."""

    def __init__(
        self, config: GPTConfig, score: Score, options: ScoreConfig, layer: int, recompute_attention: bool
    ) -> None:
        super().__init__()
        self.recompute_attention = recompute_attention
        self.gives_values = config.value_residual and layer == 0
        before, after = config.norm_place is not NormPlace.after, config.norm_place is not NormPlace.before
        self.ln_1 = build_norm(config) if before else nn.Identity()
        self.attn = SelfAttention(config, score, options, layer)
        self.ln_1_out = build_norm(config) if after else nn.Identity()
        self.ln_2 = build_norm(config) if before else nn.Identity()
        self.mlp = MLP(config)
        self.ln_2_out = build_norm(config) if after else nn.Identity()

    def forward(self, x: Tensor, around: Surroundings, masks: Masks = (None, None)) -> tuple[Tensor, Tensor | None]:
        """The residual stream x (B, T, C) after this block and, where later ones need them, its values
        (B, T, H_kv, D).

        masks  of residual dropout, after attention and after the MLP
        """

        def attention(x: Tensor) -> tuple[Tensor, Tensor]:
            out, values = self.attn(self.ln_1(x), around)
            return drop(self.ln_1_out(out), masks[0]), values

        out, values = call(self.recompute_attention, attention, x)
        x = added(x, out)
        return added(x, drop(self.ln_2_out(self.mlp(self.ln_2(x))), masks[1])), values if self.gives_values else None
