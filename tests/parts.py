"""Models for tests: small ones, and some with many parts at once, for code that has to support every part."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention import AttentionConfig, build_attention
from model.gpt import GPT
from model.options import (
    Activation,
    AttentionBias,
    Gate,
    GPTConfig,
    Norm,
    NormOver,
    NormPlace,
    NormScale,
    Positions,
    RopeScaling,
    Scaling,
)

SMALL = GPTConfig(n_layers=2, n_heads=4, n_embd=32)
GROUPED = replace(SMALL, n_kv_heads=2, norm=Norm.rms, positions=Positions.rotary)
NARROW = replace(GROUPED, n_embd=24, head_dim=8)
LLAMA = replace(
    GROUPED,
    mlp=Activation.swiglu,
    mlp_width=88,
    rope_base=500_000.0,
    rope_scaling=RopeScaling(Scaling.llama3, 8.0, original=8),
    tied=False,
)
GEMMA = replace(
    NARROW,
    norm_place=NormPlace.both,
    norm_scale=NormScale.plus_one,
    mlp=Activation.geglu,
    scale_dim=5,
    embed_scale=True,
    logit_cap=3.0,
)
# Every part that these two leave out.
EVERYTHING = replace(
    NARROW,
    attention_bias=AttentionBias.all,
    norm_place=NormPlace.after,
    norm_scale=NormScale.none,
    mlp=Activation.relu2,
    rope_fraction=0.5,
    rope_layers=[True, False],
    rope_scaling=RopeScaling(Scaling.yarn, 4.0, original=16),
    qk_norm=True,
    qk_norm_over=NormOver.width,
    gate=Gate.element,
    value_residual=True,
    value_embeddings=1,
    embed_norm=True,
    tied=False,
    mtp=0.3,
)
PARTS = {"llama": LLAMA, "gemma": GEMMA, "everything": EVERYTHING}


def built(
    config: GPTConfig = SMALL,
    seq_len: int = 16,
    vocab_size: int = 100,
    name: str = "naive",
    dropout: float = 0.0,
    spread: float = 0.0,
    seed: int = 0,
    **options: Any,
) -> GPT:
    """A model with dropout in its attention; the spread makes every parameter random, norms and mixing weights too."""
    torch.manual_seed(seed)
    model = GPT(config, vocab_size, seq_len, build_attention(AttentionConfig(name, dropout=dropout)), **options)
    if spread:
        randomize(model, spread)
    return model


@torch.no_grad()
def randomize(model: Any, spread: float) -> None:
    """Make every parameter random: fresh ones have biases of zero and norms of one."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=spread)


def prompts(*lengths: int) -> list[list[int]]:
    """Random tokens of a vocabulary of 100, so many in each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(100, (n,), generator=generator).tolist() for n in lengths]


def window(B: int = 2, T: int = 16, vocab_size: int = 100, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens (B, T), and those that follow each."""
    tokens = torch.randint(vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]
