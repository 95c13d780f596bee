"""QK norm and rotation in one pass, beside PyTorch's norm and the formula of the rotation."""

import pytest
import torch
from torch.nn import functional as F

from model.fused_rotation import can_fuse_rotation, norm_and_rotate, normed_rotation, normed_rotation_gradient
from model.options import GPTConfig, Positions
from model.positions import position_tables, rotate
from tests.interpreter import run_interpreted

EPS = 1e-6


def inputs(dtype, T=6, D=8):
    """Queries of two sequences, whose keys follow in memory; a norm's weight; and the angles."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, T, 3, D, generator=generator, dtype=torch.float64).to(dtype)[:, :, :2]
    weight = torch.rand(D, generator=generator, dtype=torch.float64).to(dtype) + 0.5
    tables = position_tables(GPTConfig(n_layers=1, n_heads=1, n_embd=D, positions=Positions.rotary), T)
    assert tables.cos is not None
    assert tables.sin is not None
    return x, weight, tables.cos.double(), tables.sin.double()


@pytest.mark.parametrize("learned", [True, False])
def test_it_is_the_norm_and_then_the_rotation_with_gradients_of_finite_differences(learned):
    x, weight, cos, sin = inputs(torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_() if learned else None
    expected = rotate(F.rms_norm(x, x.shape[-1:], weight, EPS), cos, sin)
    torch.testing.assert_close(norm_and_rotate(x, weight, cos, sin, EPS), expected)
    given = (x,) if weight is None else (x, weight)
    assert torch.autograd.gradcheck(lambda x, w=None: norm_and_rotate(x, w, cos, sin, EPS), given)


def test_its_operators_keep_the_rules_of_torch_and_compile_to_one_graph():
    x, weight, cos, sin = inputs(torch.bfloat16)
    weight, cos, sin = weight.float(), cos.float(), sin.float()
    torch.library.opcheck(normed_rotation, (x, weight, cos, sin, EPS))
    torch.library.opcheck(normed_rotation_gradient, (x, x, weight, cos, sin, EPS))
    weight.requires_grad_()
    torch.compile(norm_and_rotate, fullgraph=True, backend="aot_eager")(x, weight, cos, sin, EPS).sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


def test_the_kernels_compute_the_formula_and_its_gradients():
    run_interpreted("""
import torch
from torch.nn import functional as F
from model.positions import rotate
from model.rotation_kernel import launch_rotate, launch_rotate_gradient

torch.manual_seed(0)
for D, learned, per_row in ((64, True, False), (128, False, True), (16, True, True)):
    B, T, H = 2, 2048 // D, 3
    x = torch.randn(B, T, H + 2, D)[:, :, :H].requires_grad_()  # keys follow the queries
    weight = (torch.rand(D) + 0.5).requires_grad_() if learned else None
    angles = torch.randn(*((B, T) if per_row else (T,)), D // 2)
    cos, sin, dy = angles.cos(), angles.sin(), torch.randn(B, T, H, D)
    expected = rotate(F.rms_norm(x, (D,), weight, 1e-6), cos, sin)
    torch.testing.assert_close(launch_rotate(x, weight, cos, sin, 1e-6), expected)
    dx, dw = launch_rotate_gradient(dy, x, weight, cos, sin, 1e-6)
    wanted = torch.autograd.grad(expected, [x, *([weight] if learned else [])], dy)
    torch.testing.assert_close([dx, *([dw] if learned else [])], list(wanted))
""")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_in_training_on_a_gpu_it_takes_the_kernels_and_is_off_by_rounding_alone():
    x, weight, cos, sin = (y.cuda() for y in inputs(torch.float64, T=64, D=64))
    assert can_fuse_rotation(x.bfloat16(), cos)
    assert not can_fuse_rotation(x.bfloat16()[:, :63], cos[:63])  # tokens that fill no program
    exact, rounded = x.requires_grad_(), x.detach().bfloat16().requires_grad_()
    upstream = torch.randn_like(exact)
    results = []
    for y, dtype in ((exact, torch.float64), (rounded, torch.float32)):
        w = weight.to(dtype).requires_grad_()
        out = rotate(F.rms_norm(y, (64,), w, EPS), cos, sin) if y is exact else None
        out = norm_and_rotate(y, w, cos.float(), sin.float(), EPS) if out is None else out
        results.append((out, *torch.autograd.grad(out, (y, w), upstream.to(out.dtype))))
    for reference, ours in zip(*results, strict=True):
        assert (ours - reference).norm() <= 2**-7 * reference.norm()
