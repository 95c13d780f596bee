"""The norms of the residual stream, and of queries and keys.

    layer norm    (x - mean(x)) / sqrt(var(x) + eps) * w + b        Ba et al. 2016, "Layer Normalization", eq. 4
    RMS norm      x / sqrt(mean(x^2) + eps) * w                     Zhang and Sennrich 2019, "Root Mean Square Layer
                                                                    Normalization", eq. 4

`norm_scale` changes w: plus_one learns its difference from 1 (Gemma), none leaves it out (nanochat). An RMS norm has no
bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.precision import accum_dtype
from model.options import GPTConfig, Norm, NormScale

EPS, QK_EPS = 1e-5, 1e-6


class RMSNorm(nn.Module):
    """The RMS norm of the last dimension, in fp32, or in fp64 for fp64."""

    weight: Tensor | None

    def __init__(self, width: int, eps: float, scale: NormScale = NormScale.learned) -> None:
        super().__init__()
        self.eps, self.plus_one = eps, scale is NormScale.plus_one
        start = torch.zeros if self.plus_one else torch.ones
        self.register_parameter("weight", None if scale is NormScale.none else nn.Parameter(start(width)))

    def scale(self) -> Tensor | None:
        """w (width,); None: 1."""
        return 1 + self.weight if self.plus_one and self.weight is not None else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) in any precision; the result is in fp32 or fp64."""
        return F.rms_norm(x.to(accum_dtype(x.dtype)), x.shape[-1:], self.scale(), self.eps)


def build_norm(config: GPTConfig, has: bool = True) -> nn.Module:
    """A norm of the residual stream; the identity where the model has none there."""
    if not has:
        return nn.Identity()
    eps = config.norm_eps or EPS
    if config.norm is Norm.rms:
        return RMSNorm(config.n_embd, eps, config.norm_scale)
    learned = config.norm_scale is NormScale.learned
    return nn.LayerNorm(config.n_embd, eps, elementwise_affine=learned, bias=config.bias and learned)
