"""The sizes of a GPT, and their mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from attention.dropout import RATES, is_valid_rate


class Positions(Enum):
    """How the model encodes positions."""

    learned = "learned"  # a vector added to each embedding
    rotary = "rotary"  # queries and keys turned by an angle that grows with the position
    none = "none"  # not at all: order shows in the causal mask and in the score, such as ALiBi's


class Recompute(Enum):
    """The part that the backward pass recomputes instead of storing it."""

    none = "none"
    attention = "attention"  # each attention sub-layer, from the residual stream
    block = "block"  # each block


@dataclass
class GPTConfig:
    """The options under `model.*`.

    name        name of the preset, for tables and legends
    n_layers    blocks
    n_heads     query heads of n_embd / n_heads channels each
    n_kv_heads  key/value heads, a divisor of n_heads; None: as many as n_heads
    n_embd      channels of the residual stream
    dropout     rate for the embedding and each sub-layer's output, in steps of 1/256; attention.dropout is the rate for
                attention weights
    bias        biases in linear layers and norms, as GPT-2 has them
    positions   learned, rotary or none
    qk_norm     normalise each head's queries and keys before the scores, with a learned scale
    """

    name: str = "tiny"
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    n_embd: int = 128
    dropout: float = 0.0
    bias: bool = False
    positions: Positions = Positions.learned
    qk_norm: bool = False


class ModelError(ValueError):
    """A model or an input that does not fit; the message says what to change."""


def check_config(config: GPTConfig) -> None:
    """Raise ModelError where a model's sizes do not fit together."""
    for sentence in model_mistakes(config):
        raise ModelError(sentence)


def model_mistakes(config: GPTConfig) -> Iterator[str]:
    """A sentence for each value that no model can have, with the change that helps."""
    if not is_valid_rate(config.dropout):
        yield f"model.dropout={config.dropout} must be {RATES}."
    too_small = [name for name in ("n_layers", "n_heads", "n_embd") if getattr(config, name) < 1]
    yield from (f"model.{name}={getattr(config, name)} must be at least 1." for name in too_small)
    if too_small:
        return
    if config.n_embd % config.n_heads:
        yield (
            f"model.n_embd={config.n_embd} is not a multiple of model.n_heads={config.n_heads}; "
            f"choose model.n_heads among {divisors(config.n_embd)}."
        )
    if config.n_kv_heads is not None and (config.n_kv_heads < 1 or config.n_heads % config.n_kv_heads):
        yield (
            f"model.n_heads={config.n_heads} is not a multiple of model.n_kv_heads={config.n_kv_heads}; "
            f"choose model.n_kv_heads among {divisors(config.n_heads)}."
        )
    if config.positions is Positions.rotary and config.n_embd // config.n_heads % 2:
        yield (
            f"model.positions=rotary turns pairs of channels, and heads of {config.n_embd // config.n_heads} channels "
            f"(model.n_embd={config.n_embd} / model.n_heads={config.n_heads}) are odd; use model.positions=learned."
        )


def divisors(n: int) -> str:
    """The divisors of n up to 64, for error messages."""
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
