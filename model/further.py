"""Multi-token prediction: a second head, which predicts the token after the next from the model's stream for the next.

    h'_i = join [norm(h_i); norm(wte[t_{i+1}])]
    x = block(h')
    logits of t_{i+2} = ln_f(x) head^T

h is the stream after the last block, and embedding and head are the model's. DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", eqs. 21 to 23, with one further token. Only training uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attention.score import Range, Score, take_rows
from model.blocks import Block
from model.linear import Linear
from model.loss import IGNORE_INDEX
from model.norms import build_norm
from model.options import GPTConfig
from model.score import ScoreConfig


class Further(NamedTuple):
    """The two tokens after each input.

    tokens   (B, T) int64: the next token; any token where there is none
    targets  (B, T) int64: the one after it; -100 where it is unknown or not to be learned
    known    0-dim: the number of targets to be learned
    """

    tokens: Tensor
    targets: Tensor
    known: Tensor

    def rows(self, rows: tuple[Range, ...]) -> Further:
        """The inputs at `rows` of the sequences, and their share of the number."""
        tokens, targets = (take_rows(x, rows, dim=1) for x in (self.tokens, self.targets))
        return Further(tokens, targets, self.known * tokens.shape[1] / self.tokens.shape[1])


def further(inputs: Tensor, targets: Tensor) -> Further:
    """The two tokens after each of the inputs of whole sequences."""
    after_next = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORE_INDEX)], dim=1)
    return Further(inputs.roll(-1, dims=1), after_next, (after_next != IGNORE_INDEX).sum())


class FurtherToken(nn.Module):
    """The second head: norms, a projection and a block like the model's last."""

    def __init__(self, config: GPTConfig, score: Score, options: ScoreConfig, recompute_attention: bool) -> None:
        super().__init__()
        self.ln_h, self.ln_e = build_norm(config), build_norm(config)
        self.c_join = Linear(2 * config.n_embd, config.n_embd, bias=config.bias)
        self.block = Block(config, score, options, config.n_layers - 1, recompute_attention)
        self.ln_f = build_norm(config)

    def forward(self, h: Tensor, embedded: Tensor, through: Callable[[Block, Tensor], Tensor]) -> Tensor:
        """The input (B, T, C) of the head's logits.

        h         (B, T, C)  the model's stream after its last block
        embedded  (B, T, C)  of the next tokens
        through   calls the head's block
        """
        return self.ln_f(through(self.block, self.c_join(torch.cat([self.ln_h(h), self.ln_e(embedded)], dim=-1))))
