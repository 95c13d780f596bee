"""A model that computes with copies of its blocks' matrices in autocast's precision.

Autocast rounds these matrices before every product, and widens their gradients afterwards. Copies of them have the same
values, and gradients that no cast has widened: ranks exchange half the bytes of both, and lose no bit.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from model.gpt import GPT
from model.linear import Linear


def rounded_by_autocast(model: GPT) -> list[nn.Parameter]:
    """The matrices of the blocks that only products read which autocast takes in its own precision."""
    return [module.get_parameter("weight") for module in model.h.modules() if isinstance(module, Linear)]


def rounded(matrix: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A copy in another precision."""
    return nn.Parameter(matrix.detach().to(dtype))


def with_others(model: GPT, others: Mapping[nn.Parameter, nn.Parameter]) -> GPT:
    """A copy of the model with other parameters in place of some. Everything else that it has is the model's."""
    shared: dict[int, object] = {id(x): x for x in (model.attend, *model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared | {id(p): other for p, other in others.items()})
