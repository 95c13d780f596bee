"""The options of a GPT. Each part of the model is one choice, and the default of each is GPT-2's."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Positions(Enum):
    """How the model encodes positions."""

    learned = "learned"  # a vector added to each embedding
    rotary = "rotary"  # queries and keys rotated by an angle that grows with the position
    none = "none"  # only the causal mask, or a score such as ALiBi


class Norm(Enum):
    """The norm of the residual stream (model/norms.py)."""

    layer = "layer"
    rms = "rms"


class NormPlace(Enum):
    """Where a sub-layer has its norm (model/blocks.py)."""

    before = "before"  # x + f(norm(x))
    after = "after"  # x + norm(f(x)), as OLMo 2
    both = "both"  # x + norm(f(norm(x))), as Gemma 2


class NormScale(Enum):
    """The learned factor of a norm's channels."""

    learned = "learned"
    plus_one = "plus_one"  # 1 + the weight, as Gemma
    none = "none"  # no factor, as nanochat


class NormOver(Enum):
    """The channels that the norm of queries and keys takes together."""

    head = "head"  # the channels of each head, as Qwen 3
    width = "width"  # the channels of all heads, as OLMo 2


class Activation(Enum):
    """The MLP (model/mlps.py)."""

    gelu = "gelu"  # by tanh, as GPT-2
    gelu_exact = "gelu_exact"
    relu2 = "relu2"  # the square of ReLU
    swiglu = "swiglu"  # a second projection, through SiLU, gates the first
    geglu = "geglu"  # the same through GELU


class AttentionBias(Enum):
    """The biases that attention's projections have where the model has none."""

    none = "none"
    inputs = "inputs"  # of queries, keys and values, as Qwen 2
    all = "all"  # of the output too, as gpt-oss


class Gate(Enum):
    """The sigmoid that multiplies attention's output (model/attention.py)."""

    none = "none"
    head = "head"  # one for each head
    element = "element"  # one for each channel of each head


class Mixing(Enum):
    """How the recurrence of a mixer is computed (mixers/)."""

    recurrent = "recurrent"  # token by token: the definition, slow
    chunked = "chunked"  # chunks of tokens in plain PyTorch
    fla = "fla"  # the kernels of the package flash-linear-attention, on NVIDIA GPUs


class Scaling(Enum):
    """How rotary positions reach beyond the length that they were trained for (model/positions.py)."""

    none = "none"
    linear = "linear"
    yarn = "yarn"
    llama3 = "llama3"


class Recompute(Enum):
    """The part that the backward pass recomputes instead of storing it."""

    none = "none"
    attention = "attention"  # each attention sub-layer, from the residual stream
    block = "block"  # each block
    around_attention = "around_attention"  # each block, except for the attention kernel


@dataclass
class RopeScaling:
    """The option `model.rope_scaling`.

    kind              none, linear, yarn or llama3
    factor            the new longest sequence over the old one
    original          the old longest sequence (yarn, llama3)
    fast              channels that rotate more often over the original length stay as they are; None: 32 (yarn), 4
                      (llama3)
    slow              channels that rotate less often are slowed by the factor; None: 1
    truncate          round the channel numbers of `fast` and `slow` (yarn)
    attention_factor  multiplies cosines and sines (yarn); None: 0.1 log(factor) + 1
    """

    kind: Scaling = Scaling.none
    factor: float = 1.0
    original: int | None = None
    fast: float | None = None
    slow: float | None = None
    truncate: bool = True
    attention_factor: float | None = None


ATTENTION = "attention"  # among the names of model.layers


def misfit(option: str, pattern: Sequence[object], n_layers: int) -> str | None:
    """A sentence where a pattern over the layers, repeated, does not end with the last of them."""
    if pattern and n_layers % len(pattern) == 0:
        return None
    return (
        f"{option} has {len(pattern)} entries, which do not divide model.n_layers={n_layers}; give one for each layer, "
        f"a pattern that fits, or {option}=null."
    )


@dataclass
class GPTConfig:
    """The options under `model.*`.

    name            name of the preset, for tables and legends
    n_layers        blocks
    n_heads         query heads
    n_kv_heads      key/value heads, a divisor of n_heads; None: n_heads
    n_embd          channels of the residual stream
    dropout         rate for the embedding and each sub-layer's output, in steps of 1/256
    bias            biases in linear layers and layer norms, as GPT-2 has them
    positions       how the model tells positions apart
    qk_norm         normalise queries and keys before the scores
    head_dim        channels of a head; None: n_embd / n_heads
    vocab_size      tokens that the model has a logit for; None: the tokenizer's
    tied            the head's matrix is the embedding
    attention_bias  biases in attention's projections where bias=false
    norm            LayerNorm or RMSNorm
    norm_place      relative to a sub-layer
    norm_scale      the norms' factors; plus_one: 1 plus a learned one
    norm_eps        added under the norms' roots; None: 1e-5, and 1e-6 for queries and keys
    qk_norm_over    channels that qk_norm takes together: a head's, or those of all heads
    mlp             the MLP's activation
    mlp_width       channels within the MLP; None: 4 n_embd
    rope_base       the slowest channels rotate about once in 2 pi rope_base tokens
    rope_fraction   share of a head's channels that rotate, its first ones
    rope_layers     layers with rotary positions, such as [true,true,true,false], repeated; None: all
    rope_scaling    for sequences longer than in training
    scale_dim       divide scores by the root of this instead of head_dim's
    gate            a sigmoid of the sub-layer's input on attention's output, for each head or element
    value_residual  mix the first layer's values into all others'
    value_embeddings  the number of first and of last layers whose values get an embedding of their token
    embed_scale     multiply the embedding by sqrt(n_embd), as Gemma
    embed_norm      normalise the embedding, as nanochat
    logit_cap       c in c tanh(x / c), which keeps logits between -c and c; None: no cap
    layers          attention or a mixer (docs/mixers.md) in each layer, such as [gdn,attention], repeated;
                    None: attention in all
    mixer           how mixers compute
    mtp             weight of a second head's loss, which predicts the token after the next; 0: no such head
    """

    name: str = "tiny-gpt2"
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int | None = None
    n_embd: int = 128
    dropout: float = 0.0
    bias: bool = False
    positions: Positions = Positions.learned
    qk_norm: bool = False
    head_dim: int | None = None
    vocab_size: int | None = None
    tied: bool = True
    attention_bias: AttentionBias = AttentionBias.none
    norm: Norm = Norm.layer
    norm_place: NormPlace = NormPlace.before
    norm_scale: NormScale = NormScale.learned
    norm_eps: float | None = None
    qk_norm_over: NormOver = NormOver.head
    mlp: Activation = Activation.gelu
    mlp_width: int | None = None
    rope_base: float = 10_000.0
    rope_fraction: float = 1.0
    rope_layers: list[bool] | None = None
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    scale_dim: int | None = None
    gate: Gate = Gate.none
    value_residual: bool = False
    value_embeddings: int = 0
    embed_scale: bool = False
    embed_norm: bool = False
    logit_cap: float | None = None
    mtp: float = 0.0
    layers: list[str] | None = None
    mixer: Mixing = Mixing.chunked

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.n_embd // self.n_heads

    @property
    def rotated(self) -> int:
        """The number of a head's channels that rotary positions rotate."""
        return int(self.head_size * self.rope_fraction)

    @property
    def mixers(self) -> dict[int, str]:
        """The layers that have a mixer instead of attention, and its name."""
        pattern = self.layers or [ATTENTION]
        names = {layer: pattern[layer % len(pattern)] for layer in range(self.n_layers)}
        return {layer: name for layer, name in names.items() if name != ATTENTION}

    @property
    def attention_layers(self) -> list[int]:
        """The layers that have attention."""
        mixers = self.mixers
        return [layer for layer in range(self.n_layers) if layer not in mixers]

    def value_table(self, layer: int) -> int | None:
        """The number of a layer's value embedding, which a first and a last layer share; None: it has none."""
        n, back = self.value_embeddings, layer - (self.n_layers - self.value_embeddings)
        return layer if layer < n else back if back >= 0 else None


class ModelError(ValueError):
    """A model or an input that does not fit; the message names the remedy."""
