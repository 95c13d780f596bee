"""Muon for the matrices of the hidden layers, AdamW for everything else.

    M = mu M + (1 - mu) G                     the momentum of a matrix's gradient
    O = orthogonal(mu M + (1 - mu) G)         its singular values brought near 1, by five Newton-Schulz iterations
    W = (1 - lr decay) W - 0.2 sqrt(max(rows, columns)) lr O

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The factor of Liu et al. 2025, "Muon is
Scalable for LLM Training", makes an update as large as AdamW's usually is, so learning rate and decay can be AdamW's.
The fused projection to queries, keys and values is three matrices, which are orthogonalised separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import SelfAttention

MOMENTUM = "momentum_buffer"


class Muon(torch.optim.Optimizer):
    """torch's Muon for some matrices and torch's fused AdamW for the rest, as one optimizer.

    Like the fused AdamW it reads two numbers on the device: it divides gradients by `grad_scale`, and changes nothing
    where `found_inf` is 1.
    """

    _step_supports_amp_scaling = True  # torch's name for it
    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        matrices: Sequence[tuple[Tensor, Sequence[int]]],
        options: dict[str, Any],
        momentum: float,
        adamw: torch.optim.AdamW,
    ) -> None:
        """
        matrices  each with the row counts of the parts that are orthogonalised separately
        options   {"lr": a tensor on the matrices' device, "weight_decay"}
        adamw     of all other parameters
        """
        self.adamw, self.matrices = adamw, [matrix for matrix, _ in matrices]
        super().__init__([{"params": self.matrices, **options}, *adamw.param_groups], {})
        adamw.state = self.state
        # torch's Muon would wait for the device to read a learning rate that lies there. With a learning rate and a
        # decay of 1 it replaces a parameter by its update, which `step` then applies.
        self.updates = [torch.zeros_like(matrix) for matrix in self.matrices]
        self.parts = [
            [nn.Parameter(part) for part in update.split(list(rows))]
            for update, (_, rows) in zip(self.updates, matrices, strict=True)
        ]
        self.rows = [list(rows) for _, rows in matrices]
        parts = [part for of_matrix in self.parts for part in of_matrix]
        self.muon = torch.optim.Muon(parts, lr=1.0, weight_decay=1.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none where found_inf is 1."""
        skip = self.found_inf.bool()
        for matrix, parts, rows in zip(self.matrices, self.parts, self.rows, strict=True):
            assert matrix.grad is not None
            if MOMENTUM not in self.state[matrix]:
                self.state[matrix][MOMENTUM] = torch.zeros_like(matrix)
            momentum = self.state[matrix][MOMENTUM]
            # The mean of the momentum and itself is itself, bit for bit.
            gradient = torch.where(skip, momentum, matrix.grad / self.grad_scale)
            for part, own, average in zip(parts, gradient.split(rows), momentum.split(rows), strict=True):
                part.grad, self.muon.state[part] = own, {MOMENTUM: average}
            matrix.grad = None
        self.muon.step()
        group = self.param_groups[0]
        lr = torch.where(skip, 0.0, group["lr"])
        for matrix, update in zip(self.matrices, self.updates, strict=True):
            matrix.mul_(1 - lr * group["weight_decay"]).addcmul_(update, lr)
        self.muon.zero_grad()
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Part of `load_state_dict`, which makes new groups and a new state: AdamW shares them."""
        super().__setstate__(state)
        self.adamw.__setstate__({"state": self.state, "param_groups": self.param_groups[1:]})


def hidden_matrices(model: nn.Module) -> list[tuple[Tensor, list[int]]]:
    """The weights of the linear layers but the head, each with the row counts of the matrices in it."""
    attentions = [m for m in model.modules() if isinstance(m, SelfAttention)]
    fused = {m.c_attn: [n * m.head_dim for n in (m.n_heads, m.n_kv_heads, m.n_kv_heads)] for m in attentions}
    head = getattr(model, "lm_head", None)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return [(m.weight, fused.get(m, [len(m.weight)])) for m in linear if m.weight.requires_grad]
