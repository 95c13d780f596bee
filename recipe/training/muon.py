"""Muon for the matrices of the hidden layers, AdamW for everything else.

    M = mu M + (1 - mu) G                     the momentum of a matrix's gradient
    O = orthogonal(mu M + (1 - mu) G)         its singular values brought near 1, by five Newton-Schulz iterations
    W = (1 - lr decay) W - 0.2 sqrt(max(rows, columns)) lr O

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The factor of Liu et al. 2025, "Muon is
Scalable for LLM Training", makes an update as large as AdamW's usually is, so learning rate and decay can be AdamW's.
The fused projection to queries, keys and values is three matrices, which are orthogonalised separately. Matrices of one
shape are orthogonalised together, as `torch.optim.Muon` does it for one: a GPU has too little work in the products of a
small model's matrices one by one. Ranks that shard the matrices also divide these stacks among them (stacks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import SelfAttention
from recipe.distributed.norm import local
from recipe.distributed.stacks import Stacks

MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0, so that few iterations are enough
ITERATIONS, EPS = 5, 1e-7
STACKED = 2**26  # most elements in a stack: the memory of an update does not grow with the model


class Muon(torch.optim.Optimizer):
    """Muon for some matrices and torch's fused AdamW for the rest, as one optimizer.

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
        matrices  whole or sharded by rows, each with the row counts of the parts that are orthogonalised separately
        options   {"lr": a tensor on the matrices' device, "weight_decay"}
        adamw     of all other parameters
        """
        self.adamw, self.momentum, self.matrices = adamw, momentum, [matrix for matrix, _ in matrices]
        super().__init__([{"params": self.matrices, **options}, *adamw.param_groups], {})
        adamw.state = self.state
        self.stacks = Stacks(matrices, STACKED)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none where found_inf is 1."""
        skip, group = self.found_inf.bool(), self.param_groups[0]
        weights = [local(matrix) for matrix in self.matrices]
        averages = [local(self.average(matrix)) for matrix in self.matrices]
        # The mean of the momentum and itself is itself, bit for bit.
        gradients = [local(matrix.grad) for matrix in self.matrices if matrix.grad is not None]
        torch._foreach_div_(gradients, self.grad_scale)
        for i, (matrix, average) in enumerate(zip(self.matrices, averages, strict=True)):
            gradients[i] = torch.where(skip, average, gradients[i])
            matrix.grad = None
        torch._foreach_lerp_(averages, gradients, 1 - self.momentum)
        torch._foreach_lerp_(gradients, averages, self.momentum)
        lr = torch.where(skip, 0.0, group["lr"])
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        parts, ahead = self.stacks.parts(weights), self.stacks.parts(gradients)
        for stack, result in self.stacks.apply(orthogonal, ahead, torch.bfloat16):
            size = max(self.stacks.shapes[stack[0]])
            factor = (lr * (-0.2 * sqrt(size))).reshape(1)  # whose fp32 a number without dimensions would lose
            updates = torch.empty(result.shape, dtype=torch.float32, device=lr.device)
            torch.mul(result, factor, out=updates)
            targets = [parts[i] for i in stack]
            flat = updates.view(-1).split([x.numel() for x in targets])
            torch._foreach_add_(targets, [x.view_as(y) for x, y in zip(flat, targets, strict=True)])
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def average(self, matrix: Tensor) -> Tensor:
        """The momentum of a matrix, which begins at zero."""
        if MOMENTUM not in self.state[matrix]:
            self.state[matrix][MOMENTUM] = torch.zeros_like(matrix)
        return self.state[matrix][MOMENTUM]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Part of `load_state_dict`, which makes new groups and a new state: AdamW shares them."""
        super().__setstate__(state)
        self.adamw.__setstate__({"state": self.state, "param_groups": self.param_groups[1:]})


def orthogonal(x: Tensor) -> Tensor:
    """The matrices x (n, rows, columns), in bf16, with their singular values brought near 1.

    X = a X + (b A + c A^2) X with A = X X^T, from X / |X| on.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        products = x @ x.mT
        polynomial = torch.baddbmm(products, products, products, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def hidden_matrices(model: nn.Module) -> list[tuple[Tensor, list[int]]]:
    """The weights of the linear layers but the head, each with the row counts of the matrices in it."""
    attentions = [m for m in model.modules() if isinstance(m, SelfAttention)]
    fused: dict[nn.Module, list[int]] = {
        m.c_attn: [n * m.head_dim for n in (m.n_heads, m.n_kv_heads, m.n_kv_heads)] for m in attentions
    }
    head = getattr(model, "lm_head", None)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return [(m.weight, fused.get(m, [len(m.weight)])) for m in linear if m.weight.requires_grad]
