"""Next-token cross-entropy over a vocabulary that is padded for the hardware's sake.

loss = mean over i with target_i != -100 of  logsumexp_j(h_i w_j) - h_i w_{target_i},   j < vocab_size
"""

from __future__ import annotations

from enum import Enum

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


class LossKind(Enum):
    """How the loss over the vocabulary is computed."""

    auto = "auto"
    plain = "plain"  # all logits in memory, in fp32


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, kind: LossKind) -> Tensor:
    """Mean cross-entropy of the next token, a scalar in fp32.

    hidden      (..., C)   after the final norm
    weight      (V, C)     V >= vocab_size rows; those beyond it never enter the softmax
    targets     (...)      int64; -100 is left out of the mean
    """
    logits = F.linear(hidden, weight)[..., :vocab_size]
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX)
