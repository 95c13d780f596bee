"""The residual stream's masks: attention's keep mask for a reserved layer number, packed into bits, on every device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.dropout import DropoutKey, keep_mask
from model.dropout import LAYER, draw_masks, drop
from tests.interpreter import run_interpreted

CPU = torch.device("cpu")
KEY = DropoutKey(seed=1337, step=2, layer=0, first_sequence=5)
SHAPES = [(3, 2, 40, 96), (5, 1, 1, 30), (1, 3, 16, 64), (2, 2, 23, 200)]  # sites, B, T, C


def unpacked(bits: Tensor, C: int) -> Tensor:
    """(B, T, C) bool, column by column, in the order that the docstring of model/dropout.py gives."""
    columns = torch.arange(C)
    return (bits[..., (columns >> 6) * 8 + (columns & 7)] >> (columns >> 3 & 7) & 1).bool()


@pytest.mark.parametrize(("n_sites", "B", "T", "C"), SHAPES)
@pytest.mark.parametrize("key", [KEY, replace(KEY, first_head=2, first_query=32)], ids=["whole", "part"])
@pytest.mark.parametrize("p", [1 / 256, 0.1, 0.5, 255 / 256])
def test_bits_are_the_keep_mask(p, key, n_sites, B, T, C):
    keep = keep_mask(replace(key, layer=LAYER, first_head=0), p, B, n_sites, T, C)
    masks = draw_masks(key, p, n_sites, B, T, C, CPU)
    assert len(masks) == n_sites
    for site, mask in enumerate(masks):
        assert torch.equal(unpacked(mask.bits, C), keep[:, site])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dropped_values_are_zero_and_the_others_are_scaled_up(dtype):
    n_sites, B, T, C = SHAPES[0]
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    for site, mask in enumerate(draw_masks(KEY, 0.1, n_sites, B, T, C, CPU)):
        weight = keep_mask(replace(KEY, layer=LAYER), 0.1, B, n_sites, T, C)[:, site].double() * 256 / (256 - 26)
        out = drop(x, mask)
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert out.dtype == gradient.dtype == dtype
        torch.testing.assert_close(out.double(), x.double() * weight, rtol=torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(gradient.double(), weight, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_operator_is_sound():
    torch.library.opcheck(torch.ops.gpt.draw_bits, (KEY.pack(CPU), 0.1, 2, 2, 20, 30))


KERNEL = f"""
import torch
from attention.dropout import DropoutKey, drop_threshold
from model.dropout import LAYER, draw_bits
from model.dropout_kernel import launch_draw_bits

key = DropoutKey(seed=1337, step=2, layer=0, first_sequence=5, first_query=32)
for (n_sites, B, T, C), p in zip({[*SHAPES, (2, 1, 300, 128)]}, (1 / 256, 0.1, 0.5, 255 / 256, 0.1)):
    packed = key.at_layer(LAYER).pack(torch.device("cpu"))
    expected = draw_bits(packed, p, n_sites, B, T, C)
    actual = launch_draw_bits(packed, drop_threshold(p), n_sites, B, T, C)
    assert torch.equal(actual, expected), (n_sites, B, T, C, p)
"""


def test_the_kernel_draws_the_same_bits():
    run_interpreted(KERNEL)
