"""gpt_attention.transformers: an attention of this library in models of transformers (adapters/transformers.py)."""

from .adapters.transformers import dropout_key, register

__all__ = ["dropout_key", "register"]
