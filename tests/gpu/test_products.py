"""Products by the fastest of cuBLASLt's algorithms have the bits of torch's product, or of the first algorithm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.gpu import capability, capturing
from model import cublaslt
from model.cublaslt import PLANS, has_fast_products, multiply
from model.fused_mlp import fused_mlp, gelu_gradient, linear_gelu, linear_gelu_in_fp8, linear_in_fp8, rounded
from model.half_linear import half_linear, product
from model.linear import Linear, linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or capability(torch.device("cuda")) != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def measured_anew() -> Iterator[None]:
    kept = dict(PLANS)
    PLANS.clear()
    yield
    PLANS.clear()
    PLANS.update(kept)


def random(*shape: int, seed: int = 1, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (0.3 * torch.randn(shape, generator=generator, device=device)).to(dtype)


def test_the_gpu_has_them() -> None:
    assert has_fast_products(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k", "m"),
    [(32_768, 768, 2304), (32_768, 768, 768), (5632, 768, 50_304), (4104, 1024, 1032), (64, 65_536, 1024)],
)
def test_a_product_has_torchs_bits(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    b, w = random(n, k, dtype=dtype), random(m, k, seed=2, dtype=dtype)
    for a in (w.T, w.T.contiguous()):
        right, out = torch.mm(b, a), torch.empty(n, m, dtype=dtype, device="cuda")
        for _ in range(2):  # measured, and remembered
            assert torch.equal(multiply(b, a, out.fill_(7)), right)
    assert len(PLANS) == 2


def test_what_it_has_no_algorithm_for_is_torchs() -> None:
    """Small ones, odd rows, starts within a tensor, other dtypes and gaps between rows."""
    x, w = random(4097, 1032), random(1024, 1032, seed=2)
    cases = [(x[:8], w.T), (x[:, :1023], w[:, :1023].T), (x.float(), w.float().T), (x[:, :1024], w[:, :1024].T)]
    cases += [(x.view(-1)[8 : 8 + 4096 * 1032].view(4096, 1032), w.T), (x[:0], w.T)]
    for b, a in cases:
        out = torch.empty(len(b), a.shape[1], dtype=b.dtype, device="cuda")
        assert torch.equal(multiply(b, a, out), torch.mm(b, a))
    assert not PLANS


@pytest.mark.parametrize("bias", [False, True])
def test_products_with_gelu_have_the_bits_of_the_first_choice(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w1, w2, b1 = random(32_768, 768), random(3072, 768, seed=2), random(768, 3072, seed=3), random(3072, seed=4)
    g, h = linear_gelu(x, w1, b1 if bias else None)
    dh = gelu_gradient(x, w2, h)
    assert len(PLANS) == 2
    PLANS.clear()
    monkeypatch.setattr(cublaslt, "WORTHWHILE", float("inf"))
    right = linear_gelu(x, w1, b1 if bias else None)
    assert torch.equal(g, right[0])
    assert torch.equal(h, right[1])
    assert torch.equal(dh, gelu_gradient(x, w2, h))


@pytest.mark.parametrize("bias", [False, True])
def test_products_in_fp8_have_the_bits_of_the_first_choice(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rounded(random(32_768, 768))
    w1, w2 = rounded(random(3072, 768, seed=2), 32), rounded(random(768, 3072, seed=3), 32)
    b1 = random(3072, seed=4) if bias else None
    g, h = linear_gelu_in_fp8(x, w1, b1)
    y = linear_in_fp8(g, w2)
    assert len(PLANS) == 2
    sums = x.float() @ w1.float().T / 32 + (0 if b1 is None else b1)
    pairs = ((h, sums), (y, g.float() @ w2.float().T / 32))
    for ours, right in pairs:
        torch.testing.assert_close(ours.float(), right, rtol=2**-7, atol=2**-10 * right.abs().max().item())
    right = rounded(F.gelu(sums, approximate="tanh")).float()
    torch.testing.assert_close(g.float(), right, rtol=2**-3, atol=2**-9)  # a step of e4m3
    PLANS.clear()
    monkeypatch.setattr(cublaslt, "WORTHWHILE", float("inf"))
    first = linear_gelu_in_fp8(x, w1, b1)
    assert torch.equal(g.view(torch.uint8), first[0].view(torch.uint8))
    assert torch.equal(h, first[1])
    assert torch.equal(y, linear_in_fp8(g, w2))


@pytest.mark.parametrize("rows", [1, 7, 1001])
def test_products_in_fp8_of_any_number_of_rows(rows: int) -> None:
    """One row is beyond e4m3 after GELU, and one is not a number."""
    x, w1, w2 = random(rows, 768), random(3072, 768, seed=2), random(768, 3072, seed=3)
    x[0] = 5 * w1[0].sign()
    if rows > 1:
        x[1, 5] = float("nan")
    g, h = linear_gelu_in_fp8(rounded(x), rounded(w1, 32), None)
    y = linear_in_fp8(g, rounded(w2, 32))
    sums = rounded(x).float() @ rounded(w1, 32).float().T / 32
    right = rounded(F.gelu(sums, approximate="tanh")).float()
    assert sums[0, 0] > 448
    assert g[0, 0].item() == 448
    torch.testing.assert_close(g.float(), right, rtol=2**-3, atol=2**-9, equal_nan=True)
    torch.testing.assert_close(h.float(), sums, rtol=2**-7, atol=2**-4, equal_nan=True)
    exact = g.float() @ rounded(w2, 32).float().T / 32
    torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=2**-10 * exact[0].abs().max().item(), equal_nan=True)


def test_nothing_is_measured_while_a_graph_captures() -> None:
    x, w = random(8192, 1024), random(1024, 1024, seed=2)
    right = torch.mm(x, w.T), *linear_gelu(x, w, None)
    PLANS.clear()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, torch.cuda.Stream()):
        captured = product(x, w), *linear_gelu(x, w, None)
    graph.replay()
    assert not PLANS
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, right, strict=True))


def test_shapes_that_vary_are_not_measured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "REMEMBERED", 2)
    w = random(2048, 2048, seed=2)
    for n in range(1024, 1064, 8):
        x = random(n, 2048)
        assert torch.equal(product(x, w), torch.mm(x, w.T))
        torch.testing.assert_close(linear_gelu(x, w, None)[1], torch.mm(x, w.T))
    assert len(PLANS) == 2


def test_a_measurement_copies_no_logits() -> None:
    h, w, out = random(5632, 768), random(50_304, 768, seed=2), torch.empty(5632, 50_304, device="cuda").bfloat16()
    torch.mm(h, w.T, out=out)  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    multiply(h, w.T, out)
    assert len(PLANS) == 1
    assert torch.cuda.max_memory_allocated() - before < 200 << 20  # of 540 MiB


def test_a_compiled_layer_has_the_bits_of_torchs() -> None:
    layer, x = Linear(768, 2304, bias=False, device="cuda"), random(8, 1024, 768, dtype=torch.float32).requires_grad_()
    upstream = random(8, 1024, 2304, seed=2)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            y = function(x)
        results.append([y, *torch.autograd.grad(y, [x, layer.weight], upstream)])
    assert len(PLANS) == 2  # forward, and for the input's gradient
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_a_whole_weight_and_one_that_was_gathered_in_bf16_have_the_same_gradient() -> None:
    x, weight, results = random(8192, 768), random(2304, 768, seed=2, dtype=torch.float32), []
    compiled = torch.compile(linear, fullgraph=True)
    for w in (weight.requires_grad_(), weight.detach().bfloat16().requires_grad_()):
        with torch.autocast("cuda", torch.bfloat16):
            y = compiled(x, w)
        results.append((y, torch.autograd.grad(y, w, y.detach())[0].float()))
    assert PLANS
    assert all(torch.equal(whole, gathered) for whole, gathered in zip(*results, strict=True))


def test_an_mlp_in_fp8_has_the_same_bits_compiled_or_not_with_whole_weights_and_gathered_ones() -> None:
    """The compiler would round whole weights to e4m3 without the rounding to bf16 that gathered ones have."""
    x, upstream = random(8192, 768).requires_grad_(), random(8192, 768, seed=4)
    whole = [random(3072, 768, seed=2, dtype=torch.float32), random(768, 3072, seed=3, dtype=torch.float32)]
    compiled, results = torch.compile(fused_mlp, fullgraph=True), []
    for function, dtype in ((fused_mlp, torch.float32), (compiled, torch.float32), (compiled, torch.bfloat16)):
        w1, w2 = (w.to(dtype).requires_grad_() for w in whole)
        with torch.autocast("cuda", torch.bfloat16):
            y = function(x, w1, None, w2, None, True)
        results.append([y, *(dx.float() for dx in torch.autograd.grad(y, [x, w1, w2], upstream))])
    for name, *values in zip(("y", "dx", "dw1", "dw2"), *results, strict=True):
        assert torch.equal(values[0], values[1]), f"{name}: compiled"
        assert torch.equal(values[1], values[2]), f"{name}: gathered"


def test_layers_have_second_derivatives() -> None:
    x, w = random(8192, 1024).requires_grad_(), random(1024, 1024, seed=2).requires_grad_()
    results = []
    for function in (half_linear, torch.nn.functional.linear):
        with torch.autocast("cuda", torch.bfloat16):
            y = function(x, w)
        (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.float().square().sum(), w)[0].float())
    assert PLANS
    ours, theirs = results
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_products_run_on_the_gpu_of_their_tensors() -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        x, w = random(8192, 1024, device=device), random(1024, 1024, seed=2, device=device)
        given = [t.clone().requires_grad_() for t in (x, w, w)]
        y = fused_mlp(given[0], given[1], None, given[2], None)
        y.backward(x)
        results.append([t.cpu() for t in (product(x, w), y, *(t.grad for t in given))])
    assert torch.cuda.current_device() == 0
    assert {plan.device.index for plan in PLANS} == {0, 1}
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
