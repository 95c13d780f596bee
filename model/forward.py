"""The inputs of one forward pass through the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from attention.layout import Layout
from model.attention import Attend, Surroundings
from model.blocks import Masks
from model.options import GPTConfig
from model.positions import PositionTables


class Embedded(NamedTuple):
    """Tokens on their way into the first block.

    x          (B, T, C) the residual stream
    positions  rows of the tokens
    values     (B, T, H_kv D) of each value embedding
    """

    x: Tensor
    positions: PositionTables
    values: tuple[Tensor, ...] = ()


class Pass(NamedTuple):
    """The inputs of all layers: shared ones, and ones that differ from layer to layer.

    attends  the attention that each layer calls
    keys     packed, of each layer's dropout on attention weights; None drops nothing
    masks    of residual dropout, two for each block; None keeps all
    """

    embedded: Embedded
    attends: Sequence[Attend]
    layout: Layout
    keys: Tensor | None = None
    masks: Masks | None = None

    def around(self, layer: int, config: GPTConfig, first_values: Tensor | None) -> Surroundings:
        """The inputs of a layer. The block of a second head comes after the last layer and gets the same inputs."""
        table = config.value_table(min(layer, config.n_layers - 1))
        return Surroundings(
            self.embedded.positions,
            self.layout,
            self.attends[layer],
            None if self.keys is None else self.keys[layer],
            first_values,
            None if table is None else self.embedded.values[table],
        )

    def masks_of(self, layer: int) -> Masks:
        """The masks of a layer's residual dropout."""
        return (None, None) if self.masks is None else self.masks[2 * layer : 2 * layer + 2]
