"""The matrices that autocast rounds wherever they are used."""

from __future__ import annotations

from torch import nn

from model.gpt import GPT
from model.linear import Linear


def rounded_by_autocast(model: GPT) -> list[nn.Parameter]:
    """The matrices of the blocks that only products read which autocast takes in its own precision."""
    return [module.get_parameter("weight") for module in model.h.modules() if isinstance(module, Linear)]
