"""The stream's sum and its norm in one pass, beside PyTorch's sum, dropout by the keep mask, and PyTorch's norms."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attention import DropoutKey
from attention.dropout import keep_mask
from model import blocks, fused_norm, gpt
from model.blocks import Stream
from model.dropout import LAYER, Mask, draw_masks
from model.further import further
from model.fused_norm import add_norm, add_norm_gradient, added_and_normed, can_add_norm
from model.gpt import Computation
from model.norms import RMSNorm
from model.options import GPTConfig, Norm, NormPlace, NormScale, Recompute
from tests.equal import assert_equal
from tests.interpreter import run_interpreted
from tests.parts import built, window

B, T, C = 2, 5, 72
P = 64 / 256
KEY = DropoutKey(seed=1, step=2, layer=0, first_sequence=3)
NORMS = {
    "layer": lambda: nn.LayerNorm(C),
    "layer without bias": lambda: nn.LayerNorm(C, bias=False),
    "layer without weights": lambda: nn.LayerNorm(C, elementwise_affine=False),
    "rms": lambda: RMSNorm(C, 1e-5),
    "rms plus one": lambda: RMSNorm(C, 1e-5, NormScale.plus_one),
    "rms without weights": lambda: RMSNorm(C, 1e-5, NormScale.none),
}


def build(name: str) -> nn.Module:
    """A norm whose weights are neither 0 nor 1."""
    norm = NORMS[name]()
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


def expected(x: Tensor, out: Tensor, dropped: bool, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum and its norm by the formulas, in the inputs' precision."""
    if dropped:
        B, T, C = x.shape
        out = torch.where(keep_mask(KEY.at_layer(LAYER), P, B, 1, T, C, device=x.device)[:, 0], out / (1 - P), 0)
    total = x + out
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if isinstance(norm, nn.LayerNorm):
        centred = total - total.mean(-1, keepdim=True)
        h = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    else:
        h = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        weight = None if weight is None else weight + norm.plus_one
    h = h if weight is None else h * weight
    return total, h if bias is None else h + bias


def mask_if(dropped: bool) -> Mask | None:
    return draw_masks(KEY, P, 1, B, T, C, torch.device("cpu"))[0] if dropped else None


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    ("of_x", "of_out", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.float32, torch.bfloat16, 2**-8),
        (torch.bfloat16, torch.bfloat16, 2**-7),
    ],
)
def test_it_is_the_sum_and_its_norm_with_their_gradients(name, dropped, of_x, of_out, tolerance):
    torch.manual_seed(0)
    norm = build(name)
    x, out = torch.randn(B, T, C).to(of_x).requires_grad_(), torch.randn(B, T, C).to(of_out).requires_grad_()
    upstream = torch.randn(B, T, C).to(of_x), torch.randn(B, T, C).to(of_out)
    leaves = [x, out, *norm.parameters()]
    given = added_and_normed(x, out, mask_if(dropped), norm)
    assert [y.dtype for y in given] == [of_x, of_out]
    wanted = expected(x.double(), out.double(), dropped, norm)
    gradients = torch.autograd.grad(given, leaves, upstream)
    assert [gradient.dtype for gradient in gradients] == [leaf.dtype for leaf in leaves]
    exact = torch.autograd.grad(wanted, leaves, [y.double() for y in upstream])
    for ours, reference in zip((*given, *gradients), (*wanted, *exact), strict=True):
        assert (ours - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize(
    ("name", "dropped"), [("layer", True), ("layer without bias", False), ("rms without weights", True)]
)
def test_its_operators_keep_the_rules_of_torch(name, dropped):
    torch.manual_seed(0)
    norm, mask = build(name), mask_if(dropped)
    x, out = torch.randn(B, T, C, requires_grad=True), torch.randn(B, T, C).bfloat16().requires_grad_()
    bits, scale = (None, 1.0) if mask is None else (mask.bits, mask.scale)
    weight, bias, centred = getattr(norm, "weight", None), getattr(norm, "bias", None), name != "rms without weights"
    given = (x, out, bits, scale, weight, bias, 1e-5, centred)
    torch.library.opcheck(add_norm, given)
    total, h, stats = (y.detach() for y in add_norm(*given))
    sums = 0 if weight is None else 1 if bias is None else 2
    weight = None if weight is None else weight.detach()
    torch.library.opcheck(add_norm_gradient, (total, h, total, stats, bits, scale, weight, sums))
    torch.library.opcheck(add_norm_gradient, (h, h, h, stats, None, 1.0, weight, sums))


def test_the_kernels_compute_what_the_plain_code_does():
    run_interpreted("""
import torch
from attention import DropoutKey
from model import norm_kernel
from model.dropout import draw_masks
from model.fused_norm import add_norm, add_norm_gradient

torch.manual_seed(0)
norm_kernel.PROGRAMS = 4
B, T = 2, 5
for C, centred, dropped, sums, dtype in (
    (72, True, True, 1, torch.bfloat16), (128, True, False, 2, torch.float32), (200, False, True, 1, torch.bfloat16),
    (72, False, False, 0, torch.bfloat16), (64, True, True, 0, torch.float32),
):
    key = DropoutKey(1, 2, 0, 0)
    mask = draw_masks(key, 0.25, 1, B, T, C, torch.device("cpu"))[0] if dropped else None
    bits, scale = (None, 1.0) if mask is None else (mask.bits, mask.scale)
    weight, bias = torch.rand(C) + 0.5 if sums else None, torch.randn(C) if sums == 2 else None
    x, out, d_sum, d_h = torch.randn(B, T, C), torch.randn(B, T, C).to(dtype), torch.randn(B, T, C), None
    d_h = torch.randn(B, T, C).to(dtype)
    given = x, out, bits, scale, weight, bias, 1e-5, centred
    total, h, stats = add_norm(*given)
    backward = d_sum, d_h, total, stats, bits, scale, weight, sums
    ours = *norm_kernel.launch_add_norm(*given), *norm_kernel.launch_add_norm_gradient(*backward)
    for given, wanted in zip(ours, (total, h, stats, *add_norm_gradient(*backward))):
        if given is None:
            assert wanted.numel() == 0
        else:
            tolerance = 2**-7 if given.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)
""")


def gradients(config: GPTConfig, recompute: Recompute, compiled: bool = False) -> dict[str, Tensor]:
    """Of a small model's loss, in bf16 with dropout."""
    torch._dynamo.reset()
    model = built(config, dropout=0.1, computation=Computation(recompute))
    network = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    inputs, targets = window()
    with torch.autocast("cpu", torch.bfloat16):
        model.objective(network(inputs, targets, dropout_key=KEY, further=further(inputs, targets))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("options", "recompute", "sums"),
    [
        ({"bias": True}, Recompute.none, 3),
        ({}, Recompute.block, 2 + 2),  # computed twice
        ({}, Recompute.attention, 2),
        ({"norm": Norm.rms, "norm_place": NormPlace.after}, Recompute.none, 0),
        ({"norm": Norm.rms, "mtp": 0.3}, Recompute.none, 4),
    ],
    ids=str,
)
def test_a_model_trains_as_with_separate_sums_and_norms(options, recompute, sums, monkeypatch):
    """Two layers have three sums with a norm after them; recomputed ones join only the one inside each block."""
    config, seen = GPTConfig(n_layers=2, n_heads=2, n_embd=64, dropout=0.1, **options), []
    separate = gradients(config, recompute)

    def counted(*given):
        seen.append(given)
        return added_and_normed(*given)

    monkeypatch.setattr(blocks, "added_and_normed", counted)
    for module in (fused_norm, gpt):  # on a CPU, by the plain code
        monkeypatch.setattr(module, "can_fuse_stream", lambda x: torch.is_autocast_enabled("cpu"))
    pairs = [(gradients(config, recompute), separate)]
    assert len(seen) == sums
    if config.bias:
        monkeypatch.setattr(blocks, "added_and_normed", added_and_normed)
        single = replace(config, n_layers=1)
        pairs.append((gradients(single, recompute, compiled=True), gradients(single, recompute)))
    for given, wanted in pairs:
        assert given.keys() == wanted.keys()
        for name, gradient in given.items():
            assert (gradient - wanted[name]).norm() <= 2**-5 * wanted[name].norm(), name


def test_a_norm_that_does_not_follow_the_sum_directly_stays_separate():
    x, out = torch.randn(B, T, C), torch.randn(B, T, C)
    assert not can_add_norm(x, out, nn.LayerNorm(C))  # on a CPU
    total, h = Stream(x, out).normed(nn.Identity())
    assert torch.equal(total, x + out)
    assert h is total


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
def test_in_training_on_a_gpu_it_takes_the_kernels_and_always_gives_the_same_bits(of_x, dropped):
    torch.manual_seed(0)
    norm = nn.LayerNorm(768).to("cuda")
    x, out, d_sum, d_h = (torch.randn(2, 700, 768, device="cuda") for _ in range(4))
    x, d_sum, out, d_h = x.to(of_x), d_sum.to(of_x), out.bfloat16(), d_h.bfloat16()
    with torch.autocast("cuda", torch.bfloat16):
        assert can_add_norm(x, out, norm)
        assert not can_add_norm(x, out.float(), norm)
        assert not can_add_norm(x, out, nn.Identity())
    mask = draw_masks(KEY, P, 1, 2, 700, 768, torch.device("cuda"))[0] if dropped else None
    leaves = [x.requires_grad_(), out.requires_grad_(), *norm.parameters()]
    results = []
    for _ in range(3):
        given = added_and_normed(x, out, mask, norm)
        results.append((*given, *torch.autograd.grad(given, leaves, (d_sum, d_h))))
    for again in results[1:]:
        assert_equal(again, results[0])
    exact = expected(x.double(), out.double(), dropped, norm)
    of_leaves = torch.autograd.grad(exact, leaves, (d_sum.double(), d_h.double()))
    for ours, reference in zip(results[0], (*exact, *of_leaves), strict=True):
        assert (ours - reference).norm() <= 2**-7 * reference.norm()
