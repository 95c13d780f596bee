"""Numbers that the model derives from a token's position m.

    rotary       the pair (i, i + D / 2) of a head's first D channels is rotated by the angle m f_i,
                 f_i = base^(-2i / D)                     Su et al. 2021, "RoFormer", eq. 15

For sequences that are `factor` times as long as in training, f changes to

    linear       f / factor                               Chen et al. 2023, "Extending Context Window of Large Language
                                                          Models via Positional Interpolation"
    yarn         r f + (1 - r) f / factor, where r falls from 1 to 0 between the channels that rotate `fast` and `slow`
                 times over the original length; cosines and sines are multiplied by 0.1 log(factor) + 1
                                                          Peng et al. 2023, "YaRN", eqs. 17 to 22
    llama3       r f + (1 - r) f / factor, where r falls linearly in the rotations over the original length, from 1 at
                 `fast` to 0 at `slow`                    Llama Team 2024, "The Llama 3 Herd of Models"; their code
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attention.precision import accum_dtype
from attention.score import Range, take_rows
from model.embedding import lookup
from model.options import GPTConfig, Positions, RopeScaling, Scaling

# The positions of tokens (B, T): as many integers or, where all rows have the same ones, their ranges.
Places = Tensor | tuple[Range, ...]

FAST = {Scaling.yarn: 32.0, Scaling.llama3: 4.0}
SLOW = 1.0


class PositionTables(NamedTuple):
    """A row for each position, or for the tokens of a batch; None for tables that a model does not use.

    cos, sin  (N, D / 2) of the angles by which D channels of a head are rotated
    """

    cos: Tensor | None = None
    sin: Tensor | None = None

    def at(self, places: Places) -> PositionTables:
        """The rows of tokens (B, T): (B, T, ...), or (T, ...) where all rows have the same positions."""
        return PositionTables(*(None if table is None else rows_at(table, places) for table in self))

    def to(self, device: torch.device) -> PositionTables:
        """The same on a device."""
        return PositionTables(*(None if table is None else table.to(device) for table in self))

    def rotate(self, x: Tensor) -> Tensor:
        """Queries or keys x (B, T, H, D) at these positions."""
        return x if self.cos is None or self.sin is None else rotate(x, self.cos, self.sin)


def position_tables(config: GPTConfig, length: int) -> PositionTables:
    """The rows of positions 0 to length - 1, in fp32 on the CPU."""
    if config.positions is not Positions.rotary:
        return PositionTables()
    angles = torch.outer(torch.arange(length), frequencies(config))  # (N, D / 2)
    factor = attention_factor(config.rope_scaling)
    return PositionTables(angles.cos() * factor, angles.sin() * factor)


def has_rotation(config: GPTConfig, layer: int) -> bool:
    """Whether a layer has rotary positions. Layers without them: Yang et al. 2025, "Rope to Nope and Back Again"."""
    pattern = config.rope_layers or [True]
    return config.positions is Positions.rotary and pattern[layer % len(pattern)]


def frequencies(config: GPTConfig) -> Tensor:
    """The angle between two positions for each channel pair, (D / 2,)."""
    D, scaling = config.rotated, config.rope_scaling
    f = config.rope_base ** (-torch.arange(0, D, 2) / D)
    if scaling.kind is Scaling.none:
        return f
    if scaling.kind is Scaling.linear:
        return f / scaling.factor
    assert scaling.original is not None
    fast, slow = scaling.fast or FAST[scaling.kind], scaling.slow or SLOW
    if scaling.kind is Scaling.yarn:
        ends = [D / 2 * math.log(scaling.original / (2 * math.pi * n), config.rope_base) for n in (fast, slow)]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
        first, last = max(first, 0), min(last, D - 1)
        unchanged = 1 - ((torch.arange(D // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
    else:
        turns = scaling.original * f / (2 * math.pi)
        unchanged = ((turns - slow) / (fast - slow)).clamp(0, 1)
    return unchanged * f + (1 - unchanged) * f / scaling.factor


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines: its square multiplies the scores."""
    if scaling.kind is not Scaling.yarn:
        return 1.0
    return 0.1 * math.log(scaling.factor) + 1 if scaling.attention_factor is None else scaling.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of the first D channels of each head; the others stay.

    x         (B, T, H, D or more)
    cos, sin  (T, D / 2) or (B, T, D / 2), of the tokens' angles
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (T, 1, D / 2)
    D = 2 * cos.shape[-1]
    first, second = x[..., :D].to(accum_dtype(x.dtype)).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return turned if x.shape[-1] == D else torch.cat([turned, x[..., D:]], dim=-1)


def rows_at(table: Tensor, places: Places) -> Tensor:
    """The rows of table (N, ...) for the tokens at `places`: (B, T, ...), or (T, ...) where all have the same ones."""
    return lookup(table, places) if isinstance(places, Tensor) else take_rows(table, places, dim=0)
