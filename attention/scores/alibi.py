"""ALiBi: each head subtracts its slope times the distance. Press et al. 2022, "Train Short, Test Long".

Kernels recognise `slope[h] * (i - j)`. Those for Hopper compute it in their products (flash/hopper/), and keys so far
away that their weights are zero are skipped (flash/horizon.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formula.graph import Node, leaf, make
from .option import HeadTensor, Recognised, ScoreOption


def alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> Tensor:
    """(H,) fp32, Press et al.'s: 2^(-8 h / H) for h = 1 ... H where H is a power of two; else those of the power of two
    below, then every other one of that above."""
    below = 1 << n_heads.bit_length() - 1
    h = torch.arange(1, n_heads + 1, dtype=torch.float32, device=device)
    return torch.where(h <= below, torch.exp2(-8 * h / below), torch.exp2(-4 * (2 * (h - below) - 1) / below))


class ALiBi(ScoreOption):
    """subtract slope_h (i - j) from the score of query i and key j"""

    name, order = "alibi", 3
    title = "ALiBi"
    looks_back = is_formula = in_kernels = True
    tensor = HeadTensor("slopes", alibi_slopes, learned=False, meaning="slope")

    def formula(self, value: bool, s: str) -> str:
        return f"{s} - slopes[h] * (i - j)"

    def recognised(self, x: Node) -> Recognised | None:
        if x.op != "sub" or x.args[1].op != "mul":
            return None
        distance = make("real", (make("sub", (leaf("i"), leaf("j")), kind="whole"),))
        for one, other in (x.args[1].args, x.args[1].args[::-1]):
            if one.op == "load" and one.args == (leaf("h"),) and other is distance:
                return Recognised(True, x.args[0], {"slopes": str(one.value)})
        return None
