"""Pluggable attention: a name chooses the implementation, the call is the same for all.

>>> attend = build_attention(AttentionConfig(name="tiled", dropout=0.1))
>>> out = attend(q, k, v, causal=True, dropout_key=DropoutKey(seed=1337, step=0, layer=0, first_sequence=0))
"""

from attention.dropout import DropoutKey, keep_mask
from attention.flash import FlashAttention
from attention.interface import (
    Ablation,
    Attention,
    AttentionConfig,
    AttentionShape,
    DropoutRng,
    SDPABackend,
    UnsupportedAttention,
)
from attention.naive import NaiveAttention
from attention.sdpa import SDPAAttention
from attention.tiled import TiledAttention

__all__ = [
    "IMPLEMENTATIONS",
    "Ablation",
    "Attention",
    "AttentionConfig",
    "AttentionShape",
    "DropoutKey",
    "DropoutRng",
    "SDPABackend",
    "UnsupportedAttention",
    "build_attention",
    "keep_mask",
]

IMPLEMENTATIONS: dict[str, type[Attention]] = {
    cls.name: cls for cls in (NaiveAttention, TiledAttention, SDPAAttention, FlashAttention)
}


def build_attention(config: AttentionConfig) -> Attention:
    """The implementation that `config.name` names; raises UnsupportedAttention where it cannot do what is asked."""
    try:
        implementation = IMPLEMENTATIONS[config.name]
    except KeyError:
        raise UnsupportedAttention(
            f"attention={config.name} is not known; choose one of {', '.join(IMPLEMENTATIONS)}."
        ) from None
    return implementation(config)
