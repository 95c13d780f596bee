"""gpt_attention.torch_sdpa: this library's kernels for torch's attention (adapters/torch_sdpa.py)."""

from .adapters.torch_sdpa import register

__all__ = ["register"]
