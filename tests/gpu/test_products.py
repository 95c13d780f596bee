"""Products of cuBLASLt with GELU in their epilogue, beside PyTorch's."""

import pytest
import torch
from torch.nn import functional as F

from attention.gpu import capturing
from model.fused_mlp import PLANS, fused_mlp, gelu_gradient, has_fast_products, linear_gelu
from tests.equal import assert_equal
from tests.gpu.needs import A_HOPPER_GPU, TWO_GPUS

pytestmark = A_HOPPER_GPU


def random(*shape: int, seed=1, device="cuda", dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(seed)
    return (0.3 * torch.randn(shape, generator=generator, device=device)).to(dtype)


def test_the_gpu_has_them():
    assert has_fast_products(torch.device("cuda", 0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 1001, 32_768])
def test_products_with_gelu_are_pytorchs_up_to_rounding(rows, bias):
    x, w1, w2 = random(rows, 768), random(3072, 768, seed=2), random(768, 3072, seed=3)
    b1 = random(3072, seed=4) if bias else None
    g, h = linear_gelu(x, w1, b1)
    torch.testing.assert_close(h, F.linear(x, w1, b1), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(g, F.gelu(h.float(), approximate="tanh").bfloat16(), rtol=2**-6, atol=2**-7)
    exact = h.float().requires_grad_()
    F.gelu(exact, approximate="tanh").backward((x @ w2).float())
    assert exact.grad is not None
    torch.testing.assert_close(gelu_gradient(x, w2, h).float(), exact.grad, rtol=2**-5, atol=2**-5)


def test_a_graph_captures_products_that_were_never_called():
    x, w = random(8192, 1024), random(1024, 1024, seed=2)
    right = linear_gelu(x, w, None)
    PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, torch.cuda.Stream()):
        captured = linear_gelu(x, w, None)
    graph.replay()
    assert_equal(captured, right)


@TWO_GPUS
def test_products_run_on_the_gpu_of_their_tensors():
    results = []
    for device in ("cuda:0", "cuda:1"):
        x, w = random(8192, 1024, device=device), random(1024, 1024, seed=2, device=device)
        inputs = [t.clone().requires_grad_() for t in (x, w, w)]
        y = fused_mlp(inputs[0], inputs[1], None, inputs[2], None)
        y.backward(x)
        gradients = [t.grad for t in inputs if t.grad is not None]
        results.append([t.cpu() for t in (y, *gradients)])
    assert torch.cuda.current_device() == 0
    assert {plan.device.index for plan in PLANS} == {0, 1}
    assert_equal(*results)
