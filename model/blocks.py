"""The block of a GPT: attention and MLP, each with its norm, added to the residual stream.

    x = x + attention(norm(x))             norm_place=before: Radford et al. 2019, GPT-2
    x = x + norm(attention(x))             after: OLMo Team 2024, "2 OLMo 2 Furious"
    x = x + norm(attention(norm(x)))       both: Gemma Team 2024, "Gemma 2"

and the same with the MLP. A Pass has the inputs of all blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attention.layout import Layout
from attention.score import Score
from model.attention import Attend, MixerLayer, SelfAttention, Surroundings
from model.dropout import Mask, drop
from model.fused_norm import added_and_normed, can_add_norm
from model.mlps import MLP
from model.norms import build_norm
from model.options import GPTConfig, NormPlace
from model.positions import PositionTables
from model.score import ScoreConfig

Masks = Sequence[Mask | None]  # residual dropout's mask at each site; None: keep all
T = TypeVar("T")


def call(recompute: bool, function: Callable[..., T], *inputs: object, saved: frozenset[str] = frozenset()) -> T:
    """function(*inputs); if `recompute`, only the inputs and the results of some operators wait for the backward pass.

    saved  these operators' names, such as "aten::mm"
    """
    if not recompute:
        return function(*inputs)
    # Compiled without a policy, torch 2.11 also stores what each autograd.Function within saves.
    if not saved and not torch.compiler.is_compiling():
        return checkpoint(function, *inputs, use_reentrant=False)
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=contexts)


def policy(saved: frozenset[str], _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What selective checkpointing asks for each operator that a recomputed function calls."""
    return CheckpointPolicy.MUST_SAVE if operator.name() in saved else CheckpointPolicy.PREFER_RECOMPUTE


class Stream(NamedTuple):
    """The residual stream x (B, T, C), to which the output of a sub-layer has still to be added.

    So the sum and the norm of the next sub-layer can be one pass.
    """

    x: Tensor
    out: Tensor | None = None  # a norm may have left it in a higher precision
    mask: Mask | None = None  # of dropout, for the output

    def added(self) -> Tensor:
        """The sum."""
        return self.x if self.out is None else (self.x + drop(self.out, self.mask)).to(self.x.dtype)

    def normed(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        if self.out is not None and can_add_norm(self.x, self.out, norm):
            return added_and_normed(self.x, self.out, self.mask, norm)
        x = self.added()
        return x, norm(x)


class Block(nn.Module):
    """Two sub-layers, each with its norm and with dropout after it, added to the stream."""

    def __init__(
        self, config: GPTConfig, score: Score, options: ScoreConfig, layer: int, recompute_attention: bool
    ) -> None:
        super().__init__()
        self.recompute_attention = recompute_attention
        self.gives_values = config.value_residual and layer == 0
        before, after = config.norm_place is not NormPlace.after, config.norm_place is not NormPlace.before
        self.ln_1 = build_norm(config, before)
        mixer = config.mixers.get(layer)
        self.attn = SelfAttention(config, score, options, layer) if mixer is None else MixerLayer(config, mixer)
        self.ln_1_out = build_norm(config, after)
        self.ln_2 = build_norm(config, before)
        self.mlp = MLP(config)
        self.ln_2_out = build_norm(config, after)

    def forward(
        self, x: Tensor | Stream, around: Surroundings, masks: Masks = (None, None)
    ) -> tuple[Tensor | Stream, Tensor | None]:
        """The residual stream after this block, as x was given: as a Stream, or (B, T, C) with everything added.
        Where later blocks need them, also its values (B, T, H_kv, D).

        masks  of residual dropout, after attention and after the MLP
        """
        before = x if isinstance(x, Stream) else Stream(x)

        def attention(x: Tensor) -> tuple[Tensor, Tensor | None]:
            out, values = self.attn(self.ln_1(x), around)
            return drop(self.ln_1_out(out), masks[0]), values

        if self.recompute_attention or self.attn.reads_exactly:
            total = before.added()
            out, values = call(self.recompute_attention, attention, total)
            stream = Stream(total, out)
        else:
            total, h = before.normed(self.ln_1)
            out, values = self.attn(h, around)
            stream = Stream(total, self.ln_1_out(out), masks[0])
        total, h = stream.normed(self.ln_2)
        after = Stream(total, self.ln_2_out(self.mlp(h)), masks[1])
        return after if isinstance(x, Stream) else after.added(), values if self.gives_values else None


class Embedded(NamedTuple):
    """Tokens on their way into the first block.

    x          (B, T, C) the residual stream
    positions  rows of the tokens
    values     (B, T, H_kv D) of each value embedding
    """

    x: Tensor
    positions: PositionTables
    values: tuple[Tensor, ...] = ()


class Pass(NamedTuple):
    """The inputs of all layers: shared ones, and ones that differ from layer to layer.

    attends  the attention that each layer calls
    keys     packed, of each layer's dropout on attention weights; None drops nothing
    masks    of residual dropout, two for each block; None keeps all
    """

    embedded: Embedded
    attends: Sequence[Attend]
    layout: Layout
    keys: Tensor | None = None
    masks: Masks | None = None

    def around(self, layer: int, config: GPTConfig, first_values: Tensor | None) -> Surroundings:
        """The inputs of a layer. The block of a second head comes after the last layer and gets the same inputs."""
        table = config.value_table(min(layer, config.n_layers - 1))
        return Surroundings(
            self.embedded.positions,
            self.layout,
            self.attends[layer],
            None if self.keys is None else self.keys[layer],
            first_values,
            None if table is None else self.embedded.values[table],
        )
