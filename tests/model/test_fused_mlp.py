"""The MLP whose GELU is applied by its matrix products, beside PyTorch's layers one after another."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model import mlps
from model.blocks import call
from model.config import GPTConfig
from model.cublaslt import has_fast_products
from model.fused_mlp import fused_mlp, gelu_gradient, linear_gelu, linear_gelu_in_fp8, linear_in_fp8, rounded
from model.mlps import MLP

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")),
]


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


@pytest.mark.parametrize("device", DEVICES)
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


@pytest.mark.parametrize("device", DEVICES)
def test_its_operators_keep_the_rules_of_torch(device):
    x, w1, b1, w2, _ = inputs(True, torch.bfloat16, device)
    torch.library.opcheck(linear_gelu, (x.flatten(0, 1), w1, b1))
    torch.library.opcheck(gelu_gradient, (x.flatten(0, 1), w2, torch.ones(10, 64, device=device).bfloat16()))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_under_autocast_it_is_one_graph_with_gradients_of_the_weights_dtype(device):
    given = [x.requires_grad_() for x in inputs(True, torch.float32, device)]
    with torch.autocast(device, torch.bfloat16):
        y = torch.compile(fused_mlp, fullgraph=True, backend="aot_eager")(*given)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.float32 for x in given)


@pytest.mark.parametrize("device", DEVICES)
def test_an_mlp_compiles_to_one_graph_whichever_way_it_takes(device):
    mlp = MLP(GPTConfig(n_layers=1, n_heads=1, n_embd=64)).to(device)
    with torch.autocast(device, torch.bfloat16):
        torch.compile(mlp, fullgraph=True, backend="aot_eager")(torch.ones(2, 8, 64, device=device)).sum().backward()
    assert mlp.c_fc.weight.grad is not None
    assert mlp.c_fc.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_and_recomputed_it_stores_nothing_of_its_width(recompute, monkeypatch):
    """torch 2.11 stores what an autograd.Function saves within a recomputed function, if no policy forbids it."""
    monkeypatch.setattr(mlps, "is_trained_in_half", lambda x, width: True)
    mlp, stored = MLP(GPTConfig(n_layers=1, n_heads=1, n_embd=16)), list[Tensor]()
    compiled = torch.compile(lambda x: call(recompute, mlp, x), fullgraph=True, backend="aot_eager")

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    x, hooks = torch.ones(2, 12, 16, requires_grad=True), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
    y.sum().backward()
    assert any(tensor.numel() == 2 * 12 * 64 for tensor in stored) is not recompute


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (1, 16)])
def test_a_single_row_and_none_keep_their_shape(shape, device):
    weights = inputs(True, torch.bfloat16, device)[1:]
    x = torch.ones(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = fused_mlp(x, *weights)
    y.sum().backward()
    torch.testing.assert_close(y, plain(x, *weights), rtol=2**-6, atol=2**-4)
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("device", DEVICES)
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


def test_the_compiler_takes_the_choice_for_a_constant():
    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(has_fast_products) == vars(marked) != {}


def e4m3(x: Tensor) -> Tensor:
    """x (fp64) in 4 significant bits, with a step of 2^-9 or more, at most 448: Micikevicius et al. 2022, table 1."""
    step = torch.exp2(x.abs().clamp(min=2**-6).log2().floor() - 3)
    return ((x / step).round() * step).clamp(-448, 448)


def test_rounding_to_e4m3_is_that_of_its_definition():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite()]
    assert torch.equal(rounded(x).double(), e4m3(x.double()))
    assert torch.equal(rounded(x, 32.0).double(), e4m3(32 * x.double()))


class Reference(torch.autograd.Function):
    """The MLP in fp8, in fp64: rounded numbers forward, and the gradients of the products of what they approximate."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2):
        h = e4m3(x) @ (e4m3(32 * w1) / 32).T + b1
        g = e4m3(F.gelu(h, approximate="tanh"))
        ctx.save_for_backward(x, w1, w2, h, g)
        return g @ (e4m3(32 * w2) / 32).T + b2

    @staticmethod
    def backward(ctx, dy):
        x, w1, w2, h, g = ctx.saved_tensors
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            F.gelu(h, approximate="tanh").backward(dy @ w2)
        dh = h.grad
        return dh @ w1, dh.T @ x, dh.sum(0), dy.T @ g, dy.sum(0)


def fp8_inputs(bias: bool, device: str) -> list[Any]:
    """In bf16, for 48 rows of 32 channels; weights of a trained size, and one far beyond e4m3's scale."""
    x, w1, b1, w2, b2 = inputs(bias, torch.float64, device, C=32)
    w1, w2 = w1 / 8, w2 / 8
    w2[0, 0] = 20
    x = x.flatten(0, 1).repeat(5, 1)[:48] * torch.linspace(0.1, 3, 48, device=device, dtype=torch.float64)[:, None]
    return [None if t is None else t.bfloat16().requires_grad_() for t in (x, w1, b1, w2, b2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_in_fp8_it_rounds_what_the_products_read_and_no_gradient(bias, device):
    given = fp8_inputs(bias, device)
    shapes = [(48, 32), (128, 32), (128,), (32, 128), (32,)]
    exact = [
        (torch.zeros(shape, device=device) if x is None else x.detach()).double().requires_grad_()
        for x, shape in zip(given, shapes, strict=True)
    ]
    upstream = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).to(device).bfloat16()
    y, right = partial(fused_mlp, in_fp8=True)(*given), Reference.apply(*exact)
    y.backward(upstream)
    right.backward(upstream.double())
    pairs = [(y, right), *((x.grad, exact[i].grad) for i, x in enumerate(given) if x is not None)]
    for ours, reference in pairs:
        # bf16 rounds each result and h, and a sum in fp32 may be rounded to the neighbour in e4m3
        assert (ours.double() - reference).norm() < 0.01 * reference.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_its_operators_in_fp8_keep_the_rules_of_torch(device):
    checks = ("test_autograd_registration", "test_faketensor")  # others compute with what they get, not so in e4m3
    x, w1, b1, w2, _ = fp8_inputs(True, device)
    for tensor in (x, w1, b1, w2):
        tensor.requires_grad_(False)
    torch.library.opcheck(linear_gelu_in_fp8, (rounded(x), rounded(w1, 32), b1), test_utils=checks)
    g = rounded(torch.ones(48, 128, device=device))
    torch.library.opcheck(linear_in_fp8, (g, rounded(w2, 32)), test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
def test_an_mlp_in_fp8_compiles_to_one_graph_and_computes_as_another_outside_training(device):
    plain = MLP(GPTConfig(n_layers=1, n_heads=1, n_embd=64)).to(device)
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).to(device)
    in_fp8 = copy.deepcopy(plain)
    in_fp8.in_fp8 = True
    with torch.autocast(device, torch.bfloat16):
        right = plain(x)
        y = torch.compile(in_fp8, fullgraph=True, backend="aot_eager")(x)
        y.sum().backward()
        with torch.no_grad():
            assert torch.equal(in_fp8(x), plain(x))
    assert torch.equal(in_fp8(x), plain(x))
    assert in_fp8.to("meta")(x.to("meta")).shape == x.shape
    assert 0.01 < (y - right).float().norm() / right.float().norm() < 0.1
    assert in_fp8.c_fc.weight.grad is not None
    assert in_fp8.c_fc.weight.grad.dtype == torch.float32
