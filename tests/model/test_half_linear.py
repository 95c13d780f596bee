"""Linear layers in half precision, beside PyTorch's. tests/gpu/test_products.py has what needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model import linear as linear_module
from model.cublaslt import same_bits
from model.half_linear import half_linear, product
from model.linear import Linear, linear


def test_its_first_and_second_derivatives_are_those_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (5, 3)]
    assert torch.autograd.gradcheck(product, given)
    assert torch.autograd.gradgradcheck(product, given)


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 16), (16,), (0, 16), (2, 0, 16)])
@pytest.mark.parametrize("learned", [(True, True), (True, False), (False, True)])
def test_under_autocast_it_is_torchs(shape: tuple[int, ...], learned: tuple[bool, bool]) -> None:
    results = []
    for function in (half_linear, F.linear):
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(size, generator=generator) for size in (shape, (24, 16)))
        x.requires_grad_(learned[0])
        weight.requires_grad_(learned[1])
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight)
        (y * torch.linspace(-1, 1, 24).bfloat16()).sum().backward()
        results.append([y, x.grad, weight.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)  # dtypes as well
    assert [x is not None for x in results[0][1:]] == list(learned)


def test_its_operator_keeps_the_rules_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 16, generator=generator).bfloat16().requires_grad_() for n in (5, 24))
    torch.library.opcheck(product, (a, b))


def test_a_compiled_layer_takes_it_within_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a layer that is not compiled, has a bias or is used without gradients is torch's."""
    taken: list[Tensor] = []

    def counted(x: Tensor, weight: Tensor) -> Tensor:
        taken.append(x)
        return half_linear(x, weight)

    monkeypatch.setattr(linear_module, "is_trained_in_half", lambda x, width: torch.is_grad_enabled())
    monkeypatch.setattr(linear_module, "half_linear", counted)
    layer, with_bias, x = Linear(16, 24, bias=False), Linear(16, 24), torch.ones(2, 5, 16)
    compiled, compiled_with_bias = (
        torch.compile(module, fullgraph=True, backend="aot_eager") for module in (layer, with_bias)
    )
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        compiled_with_bias(x)
        with torch.no_grad():
            compiled(x)
        assert not taken
        y = compiled(x)
    assert len(taken) == 1
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((24, 16), 10.0))


def test_rows_may_vary_without_another_compilation() -> None:
    weight, compilations = torch.randn(24, 16, requires_grad=True), []

    def counting(module: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(module)
        return module

    compiled = torch.compile(half_linear, fullgraph=True, dynamic=True, backend=counting)
    for rows in (3, 5, 8):
        x = torch.randn(2, rows, 16)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(compiled(x, weight), F.linear(x, weight))
    assert len(compilations) == 1


def test_a_layer_on_the_meta_device_has_a_shape() -> None:
    x, weight = torch.ones(2, 8, 64, device="meta"), torch.ones(32, 64, device="meta")
    compiled: Any = torch.compile(linear, fullgraph=True, backend="eager")
    assert linear(x, weight).shape == compiled(x, weight).shape == (2, 8, 32)


def test_ways_count_as_alike_by_every_bit_of_all_that_they_write() -> None:
    first = torch.tensor([[1.0, 2.0, float("nan"), 0.0]]).bfloat16()
    results = [
        (first, first),
        (first.clone(), first.clone()),
        (first[:, [1, 0, 2, 3]], first),
        (first * torch.tensor([1, 1, 1, -1]), first),
        (first, first + 2**-7),
    ]
    written = torch.empty_like(first), torch.empty_like(first)

    def run(way: int) -> None:
        for target, result in zip(written, results[way], strict=True):
            target.copy_(result)

    assert same_bits(range(5), run, written) == [0, 1]


def test_bits_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.cublaslt.COMPARED", 3)
    written, right = torch.zeros(4, 8).bfloat16(), torch.arange(32).view(4, 8).bfloat16()

    def run(way: Tensor) -> None:
        written.copy_(way)

    for place in range(32):
        wrong = right.clone()
        wrong.view(-1)[place] += 0.5
        assert [way is wrong for way in same_bits([right, wrong, right.clone()], run, [written])] == [False, False]
