"""The chunked loss against the plain one, gradients included."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from model.loss import LARGE_VOCABULARY, LossKind, chunked_cross_entropy, cross_entropy
from tests.interpreter import run_interpreted

VOCAB, PADDED, C = 100, 128, 24
Inputs = tuple[Tensor, Tensor, Tensor]  # hidden, weight, targets


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 21, C, generator=generator, requires_grad=True)
    weight = torch.randn(PADDED, C, generator=generator, requires_grad=True)
    targets = torch.randint(VOCAB, (2, 21), generator=generator)
    targets[0, 3:6] = -100
    return hidden, weight, targets


def with_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, kind: LossKind, rows: int = 16
) -> tuple[Tensor, ...]:
    loss = cross_entropy(hidden, weight, targets, VOCAB, kind, rows)
    return loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight))


@pytest.mark.parametrize("rows", [1, 16, 42, 1000])
def test_chunked_equals_plain_for_every_chunk_size(inputs: Inputs, rows):
    plain, chunked = (with_gradients(*inputs, kind, rows) for kind in (LossKind.plain, LossKind.chunked))
    assert_close(chunked, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_is_as_exact_as_plain_under_autocast(inputs: Inputs, dtype):
    hidden, weight, targets = inputs
    reference = with_gradients(hidden.double(), weight.double(), targets, LossKind.plain)
    with torch.autocast("cpu", dtype):
        plain, chunked = (with_gradients(*inputs, kind) for kind in (LossKind.plain, LossKind.chunked))
    for ours, theirs, exact in zip(chunked, plain, reference, strict=True):
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-6 * exact.norm()
        assert ours.dtype == torch.float32


def test_weight_gradient_is_summed_over_chunks_in_fp32():
    # Each of 4,096 rows adds a gradient of the same sign: a bf16 sum would stop growing at a fraction of the total.
    hidden = torch.ones(4096, 4, dtype=torch.bfloat16)
    weight = torch.zeros(64, 4, requires_grad=True)
    loss = cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long), 64, LossKind.chunked, 8)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert_close(gradient[0], torch.full((4,), 1 / 64 - 1), rtol=2e-3, atol=0)


def test_no_more_than_a_chunk_of_logits_exists():
    hidden, weight, targets = torch.randn(512, 4), torch.randn(1024, 4), torch.randint(1024, (512,))
    largest = []
    for rows in (512, 16):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            cross_entropy(hidden, weight, targets, 1024, LossKind.chunked, rows)
        largest.append(max(event.self_cpu_memory_usage for event in profiled.events()))
    assert largest == [512 * 1024 * 4, 16 * 1024 * 4]


def test_evaluation_computes_no_gradients(inputs: Inputs):
    hidden, weight, targets = inputs
    with torch.no_grad():
        chunked, plain = (cross_entropy(*inputs, VOCAB, kind) for kind in (LossKind.chunked, LossKind.plain))
    assert_close(chunked, plain)
    _, *gradients = chunked_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), VOCAB, False, 16)
    assert [gradient.numel() for gradient in gradients] == [0, 0]


@pytest.mark.parametrize("with_gradients", [True, False])
def test_custom_op_passes_opcheck(inputs: Inputs, with_gradients):
    hidden, weight, targets = inputs
    hidden = hidden.detach().flatten(0, 1).requires_grad_(with_gradients)
    weight = weight.detach().requires_grad_(with_gradients)
    torch.library.opcheck(chunked_cross_entropy, (hidden, weight, targets.flatten(), VOCAB, with_gradients, 16))


def test_auto_is_plain_on_the_cpu():
    hidden, weight = torch.randn(64, 8), torch.randn(LARGE_VOCABULARY, 8, requires_grad=True)
    targets = torch.randint(LARGE_VOCABULARY, (64,))
    gradients: list[Tensor] = []
    for kind in (LossKind.auto, LossKind.plain, LossKind.chunked):
        with torch.autocast("cpu", torch.bfloat16):  # in which plain and chunked differ by rounding
            loss = cross_entropy(hidden, weight, targets, LARGE_VOCABULARY, kind)
        gradients += torch.autograd.grad(loss, weight)
    auto, plain, chunked = gradients
    assert torch.equal(auto, plain)
    assert not torch.equal(chunked, plain)


def test_kernel_equals_its_plain_form():
    run_interpreted("""
import torch
from model.loss import softmax_gradient_
from model.softmax_kernel import launch_softmax_gradient

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    logits = (5 * torch.randn(6, 9024)).to(dtype)  # a whole block and a part
    targets = torch.tensor([0, 5, 4096, -100, 8999, 17])
    expected = logits.clone()
    expected_losses = softmax_gradient_(expected, targets, 9000)
    losses = launch_softmax_gradient(logits, targets, 9000)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(logits, expected)
# Less than a block, whole blocks, a few columns more; and padding beyond the vocabulary's last block.
for vocab_size, V in ((50, 64), (8192, 8192), (16384, 16384), (16400, 16448), (50, 16384), (8100, 8320)):
    logits = torch.randn(2, V)
    logits[0, :40] = -torch.inf  # all that some threads see
    expected, targets = logits.clone(), torch.tensor([vocab_size - 1, 0])
    expected_losses = softmax_gradient_(expected, targets, vocab_size)
    torch.testing.assert_close(launch_softmax_gradient(logits, targets, vocab_size), expected_losses)
    torch.testing.assert_close(logits, expected)
outside = launch_softmax_gradient(torch.randn(1, 64), torch.tensor([63]), 50)
assert outside.isnan().all(), "a target outside the vocabulary must not pass for a loss"
""")
