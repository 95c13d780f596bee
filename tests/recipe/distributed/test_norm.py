"""The norm of gradients in pieces against torch's of all elements."""

from __future__ import annotations

import torch
from torch import nn

from recipe.distributed.norm import PIECE, PIECES, Norm, pieces


def test_the_norm_of_pieces_is_that_of_all_elements_also_without_a_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4 * PIECE // 32, 32), (3, PIECE), (5,), ()]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    frozen, without = nn.Parameter(torch.ones(7), requires_grad=False), nn.Parameter(torch.ones(7))
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    gradients = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    norm = Norm([*parameters, frozen, without])()
    torch.testing.assert_close(norm, gradients.double().norm().float())


def test_pieces_have_whole_rows_and_are_no_smaller_than_a_gpus_block() -> None:
    columns = 2**10
    assert [pieces(torch.Size(shape)) for shape in ((), (7,), (2 * PIECE,), (2 * PIECE - 2,))] == [1, 1, 2, 1]
    assert [pieces(torch.Size((rows, columns))) for rows in (64, 128, 192, 320, 321)] == [1, 2, 2, 4, 1]
    assert pieces(torch.Size((2**20, columns))) == PIECES
