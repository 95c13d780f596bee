"""The MLP of a block.

gelu      c_proj(GELU(c_fc(x)))                    Radford et al. 2019, GPT-2, where GELU is computed by tanh;
                                                   gelu_exact: by erf, as in nanoGPT
relu2     c_proj(ReLU(c_fc(x))^2)                  So et al. 2021, "Primer: Searching for Efficient Transformers"
swiglu    c_proj(SiLU(c_gate(x)) * c_fc(x))        Shazeer 2020, "GLU Variants Improve Transformer", eq. 6
geglu     c_proj(GELU(c_gate(x)) * c_fc(x))        the same
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.fused_mlp import fused_mlp, is_trained_in_half
from model.linear import Linear
from model.options import Activation, GPTConfig


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) in the tanh approximation: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2.

    (1 + tanh(u)) / 2 is the logistic function of 2 u, for which the compiler generates faster code
    (docs/notes/training-step.md).
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2"""
    return F.relu(x).square()


PLAIN: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.gelu: gelu,
    Activation.gelu_exact: F.gelu,
    Activation.relu2: relu2,
}
GATED: dict[Activation, Callable[[Tensor], Tensor]] = {Activation.swiglu: F.silu, Activation.geglu: gelu}


class MLP(nn.Module):
    """Two linear layers, with a function between them that a third one may gate."""

    c_gate: Linear | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.mlp_width or 4 * config.n_embd
        self.activation = (PLAIN | GATED)[config.mlp]
        self.c_gate = Linear(config.n_embd, width, bias=config.bias) if config.mlp in GATED else None
        self.c_fc = Linear(config.n_embd, width, bias=config.bias)
        self.c_proj = Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., C) to (..., C)."""
        if self.activation is gelu and self.c_gate is None and is_trained_in_half(x, self.c_fc.out_features):
            return fused_mlp(x, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.c_proj.bias)
        if self.c_gate is None:
            return self.c_proj(self.activation(self.c_fc(x)))
        return self.c_proj(self.activation(self.c_gate(x)) * self.c_fc(x))
