"""Pluggable attention: a name chooses the implementation, the call is the same for all.

>>> attend = build_attention(AttentionConfig(name="tiled", dropout=0.1))
>>> out = attend(q, k, v, dropout_key=DropoutKey(seed=1337, step=0, layer=0, first_sequence=0)).out
>>> out = attend(q, k, v, score=Score(window=1024, soft_cap=50.0), layout=packed(cu_seqlens, length=4096)).out
"""

from .adapters.flex import FlexAttention
from .adapters.function import of_file
from .adapters.peers import VarlenAttention
from .adapters.sdpa import SDPAAttention
from .adapters.varlen import varlen
from .decode.cache import Cache
from .dropout import DropoutKey, keep_mask
from .errors import AttentionError, Option, UnsupportedAttention
from .flash import FlashAttention
from .from_file import is_in_file
from .interface import Attention, AttentionOutput, AttentionShape
from .layout import Layout, documents, packed
from .naive import NaiveAttention
from .options import Ablation, AttentionConfig, DropoutRng, KernelPath, ProductPrecision, SDPABackend
from .score import Score, ScoreError
from .tiled import TiledAttention
from .watch import watch

__version__ = "0.3.0"

__all__ = [
    "IMPLEMENTATIONS",
    "Ablation",
    "Attention",
    "AttentionConfig",
    "AttentionError",
    "AttentionOutput",
    "AttentionShape",
    "Cache",
    "DropoutKey",
    "DropoutRng",
    "KernelPath",
    "Layout",
    "ProductPrecision",
    "SDPABackend",
    "Score",
    "ScoreError",
    "UnsupportedAttention",
    "build_attention",
    "documents",
    "keep_mask",
    "packed",
    "varlen",
    "watch",
]

IMPLEMENTATIONS: dict[str, type[Attention]] = {
    cls.name: cls
    for cls in (
        NaiveAttention,
        TiledAttention,
        SDPAAttention,
        FlashAttention,
        FlexAttention,
        VarlenAttention,
    )
}


def build_attention(config: AttentionConfig) -> Attention:
    """The implementation of the name `config.name`, which may be <file>.py:<class or function>; raises
    UnsupportedAttention for unsupported options."""
    if is_in_file(config.name):
        return of_file(config)
    try:
        implementation = IMPLEMENTATIONS[config.name]
    except KeyError:
        named, names = Option("attention", config.name), ", ".join(IMPLEMENTATIONS)
        raise UnsupportedAttention("{} is not known; choose one of {}.", named, names) from None
    return implementation(config)
