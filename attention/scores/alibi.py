"""ALiBi: each head subtracts its slope times the distance. Press et al. 2022, "Train Short, Test Long".

Kernels recognise `slope[h] * (i - j)`. Those for Hopper compute it in their products (flash/hopper/), and keys so far
away that their weights are zero are skipped (flash/horizon.py).
"""

import torch
from torch import Tensor

from ..formula.graph import Node, leaf, make
from ..gpu import HAS_TRITON
from .option import HeadTensor, Recognised, ScoreOption


def alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> Tensor:
    """(H,) fp32, Press et al.'s: 2^(-8 h / H) for h = 1 ... H where H is a power of two; else those of the power of two
    below, then every other one of that above."""
    below = 1 << n_heads.bit_length() - 1
    h = torch.arange(1, n_heads + 1, dtype=torch.float32, device=device)
    return torch.where(h <= below, torch.exp2(-8 * h / below), torch.exp2(-4 * (2 * (h - below) - 1) / below))


class ALiBi(ScoreOption):
    """subtract slope_h (i - j) from the score of query i and key j"""

    name = "alibi"
    looks_back = is_formula = in_kernels = True
    tensor = HeadTensor("slopes", alibi_slopes, learned=False)

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


if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def alibi_bias(slope2, o_m, o_n, i_n, i_reference, pos, MODE: tl.constexpr):
        """log2(e) times -slope (i - j), for slope2 = log2(e) slope, queries o_m and the keys i_n + o_n.

        o_m and o_n have shapes that broadcast to the tile's. In 16 bits all queries get the bias of the one at key
        i_reference: one number a column and not one a score. `alibi_row_bias` is the rest, constant along a row.
        """
        if MODE.exact:
            b_bias = slope2 * (i_n + o_n - (o_m + pos.offset)).to(tl.float32)
        else:
            b_bias = slope2 * o_n.to(tl.float32) + slope2 * (i_n - i_reference).to(tl.float32)
        return b_bias

    @triton.jit
    def alibi_row_bias(slope2, o_m, i_reference, pos, MODE: tl.constexpr):
        """The excess of `alibi_bias` for the queries o_m, which is subtracted from their log-sum-exp."""
        return 0.0 if MODE.exact else slope2 * (o_m + pos.offset - i_reference).to(tl.float32)
