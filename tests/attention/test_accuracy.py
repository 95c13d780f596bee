"""Every implementation against the formula in fp64, held to twice the error of the formula in its own precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention import AttentionConfig, Score, build_attention
from tests.attention.reference import KEY, Case, assert_accurate, expect, formula, gradients, reference_mask

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = {
    "naive": AttentionConfig("naive"),
    "tiled": AttentionConfig("tiled", block_q=32, block_k=48),
    "sdpa": AttentionConfig("sdpa"),
}
REPLAYING = ["naive", "tiled"]
CASES = {
    "square": Case(2, 2, 2, 113, 113, 59),
    "grouped": Case(2, 6, 2, 97, 97, 40),
    "multi_query": Case(1, 4, 1, 128, 128, 16),
    "more_keys": Case(1, 4, 2, 61, 203, 64),
    "more_queries": Case(1, 2, 1, 203, 61, 96),
    "one_query": Case(2, 2, 2, 1, 139, 111),
    "few_keys": Case(1, 2, 2, 99, 3, 32),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", REPLAYING)
def test_error_is_at_most_twice_that_of_the_plain_formula(name, case, causal, dtype):
    assert_accurate(build_attention(IMPLEMENTATIONS[name]), replace(case, causal=causal), dtype)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_torch_is_asked_for_the_same_formula(case, causal):
    case = replace(case, causal=causal)
    attend = build_attention(IMPLEMENTATIONS["sdpa"])
    got = gradients(lambda q, k, v: attend(q, k, v, score=Score(causal)), *case.tensors(torch.float32))
    for name, exact in expect(case, torch.float32).exact.items():
        torch.testing.assert_close(got[name].float(), exact.float())


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", REPLAYING)
def test_dropout_drops_what_the_mask_says_and_nothing_else(name, case, causal, dtype):
    attend = build_attention(replace(IMPLEMENTATIONS[name], dropout=0.17))
    # Where a row sees three keys or fewer, dq and dk are what is left when delta cancels dP, and FlashAttention takes
    # delta from an output that is rounded to bf16: 2.7 and 3.1 times the plain formula's error.
    factor = 4.0 if (name, case.S, dtype) == ("tiled", 3, torch.bfloat16) else 2.0
    assert_accurate(attend, replace(case, causal=causal, dropout=0.17), dtype, factor=factor)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("case", [Case(1, 2, 1, 150, 150, 64, offset=1e4), Case(1, 2, 1, 150, 150, 64, spread=1e4)])
@pytest.mark.parametrize("name", REPLAYING)
def test_scores_of_ten_thousand_neither_overflow_nor_lose_accuracy(name, case, dtype):
    q, k, _, _ = case.tensors(dtype)
    assert (q.double() @ k.double().mT).abs().max() > torch.finfo(torch.float16).max  # q k^T alone would overflow
    assert_accurate(build_attention(IMPLEMENTATIONS[name]), case, dtype)


@pytest.mark.parametrize("name", REPLAYING)
def test_a_single_token_attends_to_itself_unless_dropped(name):
    attend = build_attention(replace(IMPLEMENTATIONS[name], dropout=0.5))
    q, k, v, _ = Case(8, 4, 4, 1, 1, 16).tensors(torch.float32)
    keep = reference_mask(KEY, 0.5, 8, 4, 1, 1)
    assert 0 < keep.sum() < keep.numel()
    assert torch.equal(attend(q, k, v, dropout_key=KEY).out, 2 * v * keep)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_views_of_a_fused_projection_give_the_same_as_contiguous_tensors(name):
    attend = build_attention(IMPLEMENTATIONS[name])
    B, H, H_kv, T, D = 2, 4, 2, 50, 24
    fused = torch.randn(B, T, (H + 2 * H_kv) * D, generator=torch.Generator().manual_seed(0))
    views = [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in fused.split([H * D, H_kv * D, H_kv * D], dim=-1)]
    dout = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(1)).transpose(1, 2)
    assert not any(x.is_contiguous() for x in (*views, dout))
    got = gradients(attend, *views, dout)
    expected = gradients(attend, *(x.contiguous() for x in views), dout.contiguous())
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_that_see_nothing_are_zero_with_zero_gradients(name, dtype):
    case = Case(2, 4, 2, 75, 20, 16)
    fully_masked = case.T - case.S
    got = gradients(build_attention(IMPLEMENTATIONS[name]), *case.tensors(dtype))
    assert all(x.isfinite().all() for x in got.values())
    assert (got["out"][:, :, :fully_masked] == 0).all()
    assert (got["dq"][:, :, :fully_masked] == 0).all()
    assert (got["out"][:, :, fully_masked:] != 0).all()


@pytest.mark.parametrize("name", REPLAYING)
def test_lse_is_the_log_of_the_sum_of_exponentiated_scores(name):
    case = Case(1, 4, 2, 60, 45, 8)
    q, k, v, _ = case.tensors(torch.float32)
    _, lse = build_attention(replace(IMPLEMENTATIONS[name], dropout=0.3))(q, k, v, dropout_key=KEY, return_lse=True)
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).mT / 8**0.5
    hidden = torch.ones(60, 45, dtype=torch.bool).triu(45 - 60 + 1)
    expected = scores.exp().masked_fill(hidden, 0.0).sum(dim=-1).log()
    assert lse is not None
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    assert (lse[:, :, :15] == -torch.inf).all()
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REPLAYING)
def test_scores_whose_exponentials_underflow_still_make_a_softmax(name):
    q, k = torch.full((1, 1, 40, 1), -1.0), torch.full((1, 1, 40, 1), 300.0)
    v = torch.randn(1, 1, 40, 1)
    out, lse = build_attention(IMPLEMENTATIONS[name])(q, k, v, score=Score(causal=False), return_lse=True)
    assert lse is not None
    assert (lse < -88.7).all()
    torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_is_not_finite_in_a_visible_key_reaches_the_output(name, bad):
    q, k, v, _ = Case(1, 2, 2, 70, 70, 16).tensors(torch.float32)
    k[0, 0, 33, 2] = bad
    q[..., 2] = q[..., 2].abs() + 1  # the score with that key is +inf or NaN
    out = build_attention(IMPLEMENTATIONS[name])(q, k, v).out
    assert out[0, 0, 33:].isnan().all()
    assert out[0, 0, :33].isfinite().all()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_empty_batch_gives_an_empty_output_and_empty_gradients(name):
    case = Case(0, 4, 2, 9, 9, 8)
    got = gradients(build_attention(IMPLEMENTATIONS[name]), *case.tensors(torch.float32))
    assert got["out"].shape == got["dq"].shape == (0, 4, 9, 8)
    assert got["dk"].shape == got["dv"].shape == (0, 2, 9, 8)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("name", REPLAYING)
def test_gradients_are_the_derivatives_of_the_output(name, shape, dropout):
    T, S = shape
    config = replace(IMPLEMENTATIONS[name], dropout=dropout)
    attend = build_attention(replace(config, block_q=2, block_k=3) if name == "tiled" else config)
    q, k, v, _ = Case(1, 4, 2, T, S, 3).tensors(torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, dropout_key=KEY).out, inputs, fast_mode=True)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_scale_replaces_the_inverse_square_root_of_the_head_size(name):
    q, k, v, _ = Case(1, 2, 2, 40, 40, 16).tensors(torch.float32)
    out = build_attention(IMPLEMENTATIONS[name])(q, k, v, scale=0.5).out
    torch.testing.assert_close(out, formula(q * 0.5 * 4, k, v, causal=True))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_inputs_decide_the_precision_under_autocast(name):
    q, k, v, dout = Case(1, 2, 2, 40, 40, 16).tensors(torch.float32)
    attend = build_attention(IMPLEMENTATIONS[name])
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v).out
    assert torch.equal(out, attend(q, k, v).out)
    expected = torch.autograd.grad(attend(q, k, v).out, (q, k, v), dout)
    assert all(map(torch.equal, torch.autograd.grad(out, (q, k, v), dout), expected))
