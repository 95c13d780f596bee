"""The MLP whose GELU is applied by its matrix products, beside PyTorch's layers one after another."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model import mlps
from model.blocks import call
from model.fused_mlp import fused_mlp, gelu_gradient, linear_gelu
from model.mlps import MLP
from model.options import GPTConfig

NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_A_GPU)])


def plain(x, w1, b1, w2, b2):
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def inputs(bias: bool, dtype: torch.dtype, device: str, C: int = 16):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 5, C), (4 * C, C), (4 * C,) if bias else None, (C, 4 * C), (C,) if bias else None]
    return [
        None if shape is None else torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in shapes
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_its_gradients_are_those_of_finite_differences(bias):
    given: Any = [None if x is None else x.requires_grad_() for x in inputs(bias, torch.float64, "cpu", C=4)]
    assert torch.autograd.gradcheck(fused_mlp, given)


@EACH_DEVICE
@pytest.mark.parametrize("bias", [False, True])
def test_in_bf16_it_is_as_near_fp64_as_the_layers_one_after_another(bias, device):
    exact = inputs(bias, torch.float64, device)
    upstream = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(device, torch.float64)

    def run(function, dtype):
        given = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in exact]
        y = function(*given)
        y.backward(upstream.to(dtype))
        return [y, *(x.grad for x in given if x is not None)]

    reference = run(plain, torch.float64)
    for ours, theirs, right in zip(run(fused_mlp, torch.bfloat16), run(plain, torch.bfloat16), reference, strict=True):
        error, allowed = ((x.double() - right).norm() for x in (ours, theirs))
        assert error <= 1.5 * allowed


@EACH_DEVICE
def test_its_operators_keep_the_rules_of_torch(device):
    x, w1, b1, w2, _ = inputs(True, torch.bfloat16, device)
    torch.library.opcheck(linear_gelu, (x.flatten(0, 1), w1, b1))
    torch.library.opcheck(gelu_gradient, (x.flatten(0, 1), w2, torch.ones(10, 64, device=device).bfloat16()))


@EACH_DEVICE
def test_compiled_under_autocast_it_is_one_graph_with_gradients_of_the_weights_dtype(device):
    given = [x.requires_grad_() for x in inputs(True, torch.float32, device)]
    with torch.autocast(device, torch.bfloat16):
        y = torch.compile(fused_mlp, fullgraph=True, backend="aot_eager")(*given)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.float32 for x in given)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_and_recomputed_it_stores_nothing_of_its_width(recompute, monkeypatch):
    """torch 2.11 stores what an autograd.Function saves within a recomputed function, if no policy forbids it."""
    monkeypatch.setattr(mlps, "is_trained_in_half", lambda x, width: True)
    mlp, stored = MLP(GPTConfig(n_layers=1, n_heads=1, n_embd=16)), list[Tensor]()
    compiled = torch.compile(lambda x: call(recompute, mlp, x), fullgraph=True, backend="aot_eager")

    def keep(tensor):
        stored.append(tensor)
        return tensor

    x, hooks = torch.ones(2, 12, 16, requires_grad=True), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
    y.sum().backward()
    assert any(tensor.numel() == 2 * 12 * 64 for tensor in stored) is not recompute


@EACH_DEVICE
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (1, 16)])
def test_a_single_row_and_none_keep_their_shape(shape, device):
    weights = inputs(True, torch.bfloat16, device)[1:]
    x = torch.ones(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = fused_mlp(x, *weights)
    y.sum().backward()
    torch.testing.assert_close(y, plain(x, *weights), rtol=2**-6, atol=2**-4)
    assert x.grad is not None
    assert x.grad.shape == x.shape


@EACH_DEVICE
@pytest.mark.parametrize("learned", [[0], [1], [2], [3], [4], [3, 4], [0, 1, 2]])
def test_only_what_is_learned_has_a_gradient(learned, device):
    given, whole = (inputs(True, torch.bfloat16, device) for _ in range(2))
    for i, (one, other) in enumerate(zip(given, whole, strict=True)):
        one.requires_grad_(i in learned)
        other.requires_grad_()
    for x in (given, whole):
        fused_mlp(*x).sum().backward()
    assert [i for i, x in enumerate(given) if x.grad is not None] == learned
    assert all(torch.equal(given[i].grad, whole[i].grad) for i in learned)


def test_an_mlp_on_the_meta_device_has_a_shape():
    mlp = MLP(GPTConfig(n_layers=1, n_heads=1, n_embd=64)).to("meta")
    assert mlp(torch.ones(2, 8, 64, device="meta")).shape == (2, 8, 64)
