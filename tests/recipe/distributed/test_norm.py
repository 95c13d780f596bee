"""The norm of gradients in pieces against torch's of all elements."""

import torch
from torch import nn

from recipe.distributed.norm import PIECE, Norm


def test_the_norm_of_pieces_is_that_of_all_elements_also_without_a_gradient():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4 * PIECE // 32, 32), (3, PIECE), (5,), ()]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    frozen, without = nn.Parameter(torch.ones(7), requires_grad=False), nn.Parameter(torch.ones(7))
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(Norm([*parameters, frozen, without])(), gradients.double().norm().float())
