"""Linear layers by oneDNN have the values and gradients of the formula, and are off unless chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train as train_module
from model.linear import Linear, Products, linear, product, products_by
from recipe.run import compose
from recipe.run.metrics import read_metrics

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")

SHAPES = [((5, 7), 3), ((2, 9, 64), 48), ((1, 33, 100), 257), ((1, 1, 16), 8)]


def called(
    shape: tuple[int, ...], out: int, bias: bool, function: Callable[..., Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The output of a layer and the gradients of x, weight and bias, for the same numbers in each dtype."""
    generator = torch.Generator().manual_seed(1)
    sizes = [shape, (out, shape[-1]), *([(out,)] if bias else []), (*shape[:-1], out)]
    *inputs, upstream = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    leaves = [x.requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def errors(values: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(values, exact, strict=True)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_values_and_gradients_are_as_exact_as_those_of_the_blas(shape: tuple[int, ...], out: int, bias: bool) -> None:
    exact, theirs = (called(shape, out, bias, F.linear, dtype) for dtype in (torch.float64, torch.float32))
    with products_by(Products.onednn):
        ours = called(shape, out, bias, linear, torch.float32)
    for error, of_theirs in zip(errors(ours, exact), errors(theirs, exact), strict=True):
        assert error <= max(2 * of_theirs, 2**-22)


def test_a_layer_is_torchs_unless_onednn_is_chosen() -> None:
    x, layer = torch.randn(2, 9, 64), Linear(64, 48)
    before = layer(x)
    with products_by(Products.onednn):
        inside = layer(x)
    assert torch.equal(before, F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer(x), before)
    assert inside.grad_fn is not None
    assert before.grad_fn is not None
    assert inside.grad_fn.name() != before.grad_fn.name()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_torchs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 64, dtype=dtype), torch.randn(8, 64, dtype=dtype)
    with products_by(Products.onednn):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x.float(), weight.float()).dtype is torch.bfloat16


def test_its_operator_keeps_the_rules_of_torch_also_compiled() -> None:
    a, b = torch.randn(18, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    torch.library.opcheck(product, (a, b))


def test_a_run_takes_its_products_from_the_chosen_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the losses of the other library, up to rounding."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(" ".join(map(str, range(4000))))
    products, losses = Counter[str](), dict[str, list[float]]()

    def counted(a: Tensor, b: Tensor) -> Tensor:
        products[library] += 1
        return product(a, b)

    monkeypatch.setattr("model.linear.product", counted)
    for library in ("blas", "onednn"):
        given = [
            "data=text", "data.path=text.txt", "data.cache=cache", "seq_len=32", "device=cpu", "tracking=disabled",
            "model.n_layers=2", "model.n_embd=128", "training.batch_size=4", "training.steps=3",
            "training.eval_every=0", "training.log_every=1", "training.checkpoint_every=0", "training.sample_tokens=0",
            f"training.cpu.products={library}",
        ]  # fmt: skip
        Path(library).mkdir()
        assert train_module.train(compose.to_config(compose.composed(given)), Path(library), given) == 0
        losses[library] = [line["train/loss"] for line in read_metrics(Path(library) / "metrics.jsonl")]
    # Three steps, each forward and two gradients, of two layers with four linear layers each, and of the head.
    assert products == {"onednn": 3 * 3 * (2 * 4 + 1)}
    assert losses["onednn"] == pytest.approx(losses["blas"], abs=1e-4)
