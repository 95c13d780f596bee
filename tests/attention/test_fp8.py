"""attention.precision=fp8 without a Hopper GPU: refused calls, and the quantised tensors that its kernels read."""

from __future__ import annotations

import pytest
import torch

from attention import (
    AttentionConfig,
    AttentionShape,
    KernelPath,
    ProductPrecision,
    Score,
    UnsupportedAttention,
    build_attention,
)
from attention.flash.call import Problem
from attention.flash.hopper.configs import fp8_blocks
from attention.flash.hopper.fp8 import quantise, rotation
from attention.flash.paths import choose_path, describe_path
from attention.spec import Spec

SPEC = Spec(Score(), scale=1.0, precision="fp8")
PROBLEM = Problem(SPEC, 128, torch.bfloat16, queries=4096, keys=4096, capability=(9, 0))


def shape(**options) -> AttentionShape:
    return AttentionShape(128, 4, 4, torch.bfloat16, torch.device("cuda:0"), **options)


def fp8(**options):
    return build_attention(AttentionConfig("flash", precision=ProductPrecision.fp8, **options))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"capability": (8, 0)}, r"needs a GPU of compute capability 9.0 \(Hopper\)"),
        ({"capability": (10, 0)}, r"needs a GPU of compute capability 9.0 \(Hopper\)"),
        ({"dtype": torch.float32}, "takes bf16 or fp16, not torch.float32"),
        ({"head_dim": 192}, "takes head sizes up to 128, not 192"),
        ({"spec": SPEC._replace(score=Score(window=9, sinks=True))}, "does not support sinks, window;"),
        ({"spec": SPEC._replace(score=Score(causal=False), threshold=9)}, "does not support dropout;"),
    ],
    ids=["Ampere", "Blackwell", "fp32", "wide", "score", "dropout"],
)
def test_calls_that_fp8_lacks_are_refused_by_name(other, reason, hopper_gpu):
    for path in ("auto", "hopper"):
        assert describe_path(PROBLEM._replace(spec=SPEC._replace(path=path))) == "fp8"
    with pytest.raises(UnsupportedAttention, match=rf'^precision="fp8" {reason}.*precision="inputs"'):
        choose_path(PROBLEM._replace(**other), backward=False)


def test_the_plain_kernels_have_no_fp8(hopper_gpu):
    with pytest.raises(UnsupportedAttention, match=r'precision="fp8" has no plain kernels'):
        fp8(path=KernelPath.plain).check(shape())


def test_training_is_refused_and_evaluation_of_a_model_with_dropout_is_not(hopper_gpu):
    attend = fp8(dropout=0.1)
    attend.check(shape())
    assert attend.path(shape(), 4096) == "fp8"
    with pytest.raises(UnsupportedAttention, match=r'is for evaluation and inference.*precision="inputs"'):
        attend.check(shape(training=True))


def test_gradients_are_refused_in_the_forward():
    q, k, v = torch.randn(3, 1, 2, 16, 64, dtype=torch.bfloat16)
    for x in (q, k, v):
        with pytest.raises(UnsupportedAttention, match="has no gradients"):
            fp8()(*(y.clone().requires_grad_(y is x) for y in (q, k, v)))


def test_other_implementations_have_no_fp8():
    with pytest.raises(UnsupportedAttention, match=r'precision="fp8" has no effect with name="tiled"'):
        build_attention(AttentionConfig("tiled", precision=ProductPrecision.fp8))


@pytest.mark.parametrize(("D", "columns"), [(40, 64), (128, 128)])
def test_numbers_of_8_bits_and_their_scales_give_back_the_inputs(D, columns):
    """They round to a significand of one bit and three more."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 130, D, generator=generator) * 2 for _ in range(2))
    v[:, :, 128:] *= 1000
    k, v = k.bfloat16(), v.bfloat16()
    x = quantise(k, v, fp8_blocks(D))

    R = rotation(columns, torch.float32, torch.device("cpu"))[0, 0]
    torch.testing.assert_close(R @ R.T, columns * torch.eye(columns))
    k_scales, log2_v_scales = x.scales.repeat_interleave(128, -2)[:, :, :130].split(1, dim=-1)
    # Columns of k and keys of v: 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 of every sixteen.
    order = torch.tensor([8 * pair + 2 * thread + n for thread in range(4) for pair in range(2) for n in range(2)])
    k8, v8 = (torch.empty(1, 2, rows, n // 16, 16) for rows, n in ((130, columns), (columns, 256)))
    for found, x8 in ((k8, x.k), (v8, x.v)):
        found[..., order] = x8.float().unflatten(-1, (-1, 16))
    k8, v8 = k8.flatten(-2), v8.flatten(-2).mT
    assert not v8[:, :, 130:].any()
    assert not v8[..., D:].any()
    pad = (0, columns - D)
    for found, scales, expected in (
        (k8, k_scales, torch.nn.functional.pad(k.float(), pad) @ R),
        (v8[:, :, :130], log2_v_scales.exp2(), torch.nn.functional.pad(v.float(), pad)),
    ):
        torch.testing.assert_close(found * scales, expected, rtol=2**-4, atol=2**-9 * scales.max().item())
        assert 416 <= found.abs().max() <= 448
