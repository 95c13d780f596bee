"""An exponential moving average of the weights.

    A = d A + (1 - d) W,     d = min(decay, (1 + n) / (10 + n)) after n updates

The smaller decay of the first updates keeps the initial weights from staying in the average for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from recipe.distributed.norm import local


class MovingAverage:
    """The average of a model's weights, whole or sharded as they are.

    weights  of the average, by the names of the model's parameters
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.parameters = dict(model.named_parameters())
        self.weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current weights."""
        for name, parameter in self.parameters.items():
            self.weights[name].copy_(parameter)

    @torch.no_grad()
    def update(self, updates: Tensor, skip: Tensor) -> None:
        """Add the weights after one more update. The device decides; the host does not wait.

        updates  0-dim: the number of updates before this one
        skip     0-dim bool: the update was not taken, and the average stays as it is
        """
        share = 1 - ((1 + updates) / (10 + updates)).clamp(max=self.decay)
        share = torch.where(skip, 0.0, share)
        for name, parameter in self.parameters.items():
            local(self.weights[name]).lerp_(local(parameter), share)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block the model computes with the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            live, average = local(parameter), local(self.weights[name])
            before = live.clone()
            live.copy_(average)
            average.copy_(before)
