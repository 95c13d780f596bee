"""A layer of linear attention (mixers/layers.py) in the place of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixers.layers import LinearAttention, Mamba2, MixerState, build_mixer
from model.attention import Surroundings, labelled
from model.options import GPTConfig


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
