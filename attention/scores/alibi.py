"""ALiBi: each head subtracts its slope times the distance. Press et al. 2022, "Train Short, Test Long".

Kernels recognise `slope[h] * (i - j)`. Those for Hopper compute it in their products (flash/hopper/), and keys so far
away that their weights are zero are skipped (flash/horizon.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


def formula(score: str = "s") -> str:
    """The score less the slope of the head times the distance."""
    return f"{score} - slopes[h] * (i - j)"


def alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> Tensor:
    """(H,) fp32, Press et al.'s: 2^(-8 h / H) for h = 1 ... H where H is a power of two; else those of the power of two
    below, then every other one of that above."""
    below = 1 << n_heads.bit_length() - 1
    h = torch.arange(1, n_heads + 1, dtype=torch.float32, device=device)
    return torch.where(h <= below, torch.exp2(-8 * h / below), torch.exp2(-4 * (2 * (h - below) - 1) / below))
