"""attention.precision=fp8 on a Hopper GPU, compared with a reference in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, ProductPrecision, Score, build_attention
from bench.attention.fp8 import outliers
from tests.attention.reference import Case, formula
from tests.gpu.fp8_reference import fp8_attention
from tests.gpu.graphs import captured
from tests.gpu.test_hopper import LENGTHS, grid

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

HEAD_SIZES = (16, 40, 59, 64, 80, 96, 111, 128)


def fp8():
    return build_attention(AttentionConfig("flash", precision=ProductPrecision.fp8))


def error(x: Tensor, expected: Tensor) -> float:
    return ((x.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "case", grid((*LENGTHS, (700, 1500)), HEAD_SIZES), ids=lambda c: f"{c.H}:{c.H_kv}-{c.T}x{c.S}-{c.D}"
)
def test_error_is_that_of_the_8_bits(case, causal):
    q, k, v, _ = replace(case, causal=causal).tensors(torch.bfloat16, "cuda")
    out, lse = fp8()(q, k, v, score=Score(causal=causal), return_lse=True)
    expected = formula(q.double(), k.double(), v.double(), causal=causal)
    emulated = fp8_attention(q, k, v, causal=causal)
    assert error(out, expected) < 1.15 * error(emulated, expected) + 5e-3
    assert not out.isnan().any()
    scores = (q.double() @ k.repeat_interleave(case.H // case.H_kv, 1).double().mT) / case.D**0.5
    if causal:
        scores = scores.masked_fill(~replace(case, causal=True).visible()[:, None].cuda(), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=0.25)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers_cost_half_of_what_they_cost_with_one_scale_a_tensor(dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (outliers(1, 3, 8192, 128, generator=generator).to("cuda", dtype) for _ in range(3))
    expected = formula(q.double(), k.double(), v.double(), causal=False)
    with_one_scale = fp8_attention(q, k, v, causal=False, one_scale=True)
    assert error(fp8()(q, k, v, score=Score(causal=False)).out, expected) < error(with_one_scale, expected) / 2


def test_scores_may_be_far_apart():
    """One key takes nearly all of a row's weight, and which one changes from row to row."""
    q, k, v, _ = Case(1, 4, 4, 1000, 1000, 128, spread=100.0).tensors(torch.bfloat16, "cuda")
    expected = formula(q.double(), k.double(), v.double())
    out = fp8()(q, k, v).out
    assert not out.isnan().any()
    assert error(out, expected) < 1.15 * error(fp8_attention(q, k, v), expected) + 5e-3


def test_views_give_what_copies_give():
    """Views of one projection, and a misaligned one: the same bits as from copies."""
    fused = torch.randn(2, 300, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.transpose(1, 2) for x in fused.split([4, 2, 2], dim=2))
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(q.shape).copy_(q)
    copies = fp8()(*(x.contiguous() for x in (q, k, v))).out
    assert torch.equal(fp8()(q, k, v).out, copies)
    assert torch.equal(fp8()(shifted, k, v).out, copies)


def test_repeats_are_bitwise_equal():
    q, k, v, _ = Case(4, 6, 2, 1000, 1000, 128).tensors(torch.bfloat16, "cuda")
    first = fp8()(q, k, v).out
    assert all(torch.equal(fp8()(q, k, v).out, first) for _ in range(50))


def test_a_captured_call_gives_the_same_bits_in_every_replay():
    """The two kernels share a counter, and the second is launched before the first has ended."""
    q, k, v, _ = Case(2, 6, 2, 1000, 1000, 128).tensors(torch.bfloat16, "cuda")
    attend = fp8()
    expected = attend(q, k, v).out
    graph, out = captured(lambda: attend(q, k, v).out)
    for _ in range(50):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
