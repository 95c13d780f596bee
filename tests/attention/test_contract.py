"""Every registered implementation against the formula in fp64: errors stay below a small multiple of the formula's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import Score
from tests.attention.contract import (
    CASES,
    IN_FP64,
    NAMES,
    PRECISIONS,
    REPLAYING,
    RETURNING_LSE,
    build,
    device_of,
    factor,
    supporting,
)
from tests.attention.reference import (
    KEY,
    Case,
    assert_accurate,
    assert_each_field_of_the_key_changes_the_mask,
    expect,
    formula,
    gradients,
    reference_mask,
)


def tensors_of(name: str, case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v and the gradient of out, where the implementation runs."""
    return case.tensors(dtype, device_of(name))


def assert_as_accurate_as_it_must(name: str, case: Case, dtype: torch.dtype) -> None:
    assert_accurate(build(name, dropout=case.dropout), case, dtype, device_of(name), factor(name, case, dtype))


LARGE_SCORES = {"offset": Case(1, 2, 1, 100, 100, 64, offset=1e4), "spread": Case(1, 2, 1, 100, 100, 64, spread=1e4)}


def test_the_implementations_of_this_repository_have_what_they_are_for():
    """So that none leaves the tests below by refusing."""
    assert {"naive", "tiled", "flash", "sdpa"} <= set(NAMES)
    assert {"naive", "tiled", "flash"} <= set(REPLAYING) & set(RETURNING_LSE)
    assert {"naive", "tiled", "flash"} <= set(supporting("full", "window", "soft_cap", "alibi", "sinks", "documents"))
    assert {"naive", "tiled"} <= set(IN_FP64)


@pytest.mark.parametrize(
    ("causal", "dtype"), [*((True, dtype) for dtype in PRECISIONS), (False, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", NAMES)
def test_error_is_a_small_multiple_of_the_plain_formulas(name, case, causal, dtype):
    assert_as_accurate_as_it_must(name, replace(case, causal=causal), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", REPLAYING)
def test_dropout_drops_exactly_the_weights_of_the_mask(name, case, dtype):
    assert_as_accurate_as_it_must(name, replace(case, dropout=0.17), dtype)


@pytest.mark.parametrize("name", REPLAYING)
def test_each_field_of_the_key_changes_the_mask(name):
    q, k, v, _ = tensors_of(name, Case(2, 2, 2, 64, 64, 16))
    assert_each_field_of_the_key_changes_the_mask(build(name, dropout=0.5), q, k, v)


@pytest.mark.parametrize("name", REPLAYING)
def test_activation_checkpointing_draws_the_same_mask_again(name):
    attend = build(name, dropout=0.3)
    q, k, v, dout = tensors_of(name, Case(1, 2, 1, 40, 40, 16))
    run = partial(attend, dropout_key=KEY)
    got = gradients(lambda q, k, v: checkpoint(run, q, k, v, use_reentrant=False), q, k, v, dout)
    expected = gradients(run, q, k, v, dout)
    assert all(torch.equal(got[field], expected[field]) for field in expected)


@pytest.mark.parametrize("name", REPLAYING)
def test_nothing_is_dropped_without_a_key(name):
    q, k, v, _ = tensors_of(name, Case(1, 2, 2, 30, 30, 8))
    assert torch.equal(build(name, dropout=0.5)(q, k, v).out, build(name)(q, k, v).out)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        (name, kind, dtype)
        for name in NAMES
        for kind in LARGE_SCORES
        for dtype in PRECISIONS
        # To fp32 a score of 10,000 is exact to 0.001, and so are the weights that flash recomputes from lse.
        if (name, kind, dtype) != ("flash", "offset", torch.float32)
    ],
    ids=str,
)
def test_scores_of_ten_thousand_neither_overflow_nor_lose_accuracy(name, kind, dtype):
    case = LARGE_SCORES[kind]
    q, k, _, _ = case.tensors(dtype)
    assert (q.double() @ k.double().mT).abs().max() > torch.finfo(torch.float16).max  # q k^T alone would overflow
    assert_as_accurate_as_it_must(name, case, dtype)


@pytest.mark.parametrize("name", REPLAYING)
def test_a_single_token_attends_to_itself_unless_dropped(name):
    q, k, v, _ = tensors_of(name, Case(8, 4, 4, 1, 1, 16))
    keep = reference_mask(KEY, 0.5, 8, 4, 1, 1)
    assert 0 < keep.sum() < keep.numel()
    assert torch.equal(build(name, dropout=0.5)(q, k, v, dropout_key=KEY).out, 2 * v * keep.to(v.device))


@pytest.mark.parametrize("name", NAMES)
def test_views_of_a_fused_projection_give_the_same_as_contiguous_tensors(name):
    B, H, H_kv, T, D = 2, 4, 2, 50, 24
    fused = torch.randn(B, T, (H + 2 * H_kv) * D, generator=torch.Generator().manual_seed(0)).to(device_of(name))
    views = [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in fused.split([H * D, H_kv * D, H_kv * D], dim=-1)]
    dout = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(1)).to(device_of(name)).transpose(1, 2)
    assert not any(x.is_contiguous() for x in (*views, dout))
    got = gradients(build(name), *views, dout)
    expected = gradients(build(name), *(x.contiguous() for x in views), dout.contiguous())
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_see_nothing_are_zero_with_zero_gradients(name, dtype):
    fully_masked = 90 - 20
    got = gradients(build(name), *tensors_of(name, Case(1, 2, 1, 90, 20, 16), dtype))
    assert all(x.isfinite().all() for x in got.values())
    assert not got["out"][:, :, :fully_masked].any()
    assert not got["dq"][:, :, :fully_masked].any()
    assert (got["out"][:, :, fully_masked:] != 0).all()


@pytest.mark.parametrize("name", RETURNING_LSE)
def test_lse_is_the_log_of_the_sum_of_exponentiated_scores(name):
    q, k, v, _ = tensors_of(name, Case(1, 4, 2, 60, 45, 16))
    attend, key = (build(name, dropout=0.3), KEY) if name in REPLAYING else (build(name), None)
    _, lse = attend(q, k, v, dropout_key=key, return_lse=True)
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).mT / 4
    hidden = torch.ones(60, 45, dtype=torch.bool, device=q.device).triu(45 - 60 + 1)
    assert lse is not None
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    assert (lse[:, :, :15] == -torch.inf).all()
    torch.testing.assert_close(lse.double(), scores.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", sorted({*RETURNING_LSE} & {*supporting("full")}))
def test_scores_whose_exponentials_underflow_still_make_a_softmax(name):
    q, k = torch.full((1, 1, 40, 16), -1.0), torch.full((1, 1, 40, 16), 75.0)
    q, k, v = (x.to(device_of(name)) for x in (q, k, torch.randn(1, 1, 40, 16)))
    out, lse = build(name)(q, k, v, score=Score(causal=False), return_lse=True)
    assert lse is not None
    assert (lse < -88.7).all()
    torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out))


@pytest.mark.parametrize(
    ("name", "which", "bad"),
    [
        (name, which, bad)
        for name in NAMES
        for which in ("q", "k", "v")
        for bad in (torch.inf, -torch.inf, torch.nan)
        # torch takes a row whose scores are all -inf for one that sees nothing.
        if (name, which, bad) != ("sdpa", "q", -torch.inf)
    ],
)
def test_values_that_are_not_finite_reach_the_rows_that_see_them(name, which, bad):
    """A score of -inf has weight 0 where a row has other scores, and gives 0 / 0 where it has none."""
    q, k, v, _ = Case(1, 2, 2, 70, 70, 16).tensors(torch.float32)
    q[..., 3], k[..., 3] = q[..., 3].abs() + 1, k[..., 3].abs() + 1
    {"q": q, "k": k, "v": v}[which][0, 0, 66, 3] = bad
    expected = formula(q, k, v)[0].isfinite()
    assert not expected[0, 66].all() or (which, bad) == ("k", -torch.inf)
    got = build(name)(*(x.to(device_of(name)) for x in (q, k, v))).out[0].cpu().isfinite()
    assert torch.equal(got[0, 66:], expected[0, 66:])
    assert got[expected].all(), "other rows"


@pytest.mark.parametrize(("B", "T", "S"), [(0, 9, 9), (2, 9, 0), (2, 0, 9)])
@pytest.mark.parametrize("name", NAMES)
def test_empty_inputs_give_empty_or_zero_results(name, B, T, S):
    q, k = torch.ones(B, 4, T, 16, device=device_of(name)), torch.ones(B, 2, S, 16, device=device_of(name))
    got = gradients(build(name), q, k, k, q)
    assert [got[x].shape for x in ("out", "dq", "dk", "dv")] == [q.shape, q.shape, k.shape, k.shape]
    assert not any(x.any() for x in got.values())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("name", sorted({*IN_FP64} & {*REPLAYING}))
def test_gradients_are_the_derivatives_of_the_output(name, T, S, dropout):
    attend = build(name, dropout=dropout)
    q, k, v, _ = tensors_of(name, Case(1, 4, 2, T, S, 3), torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, dropout_key=KEY).out, inputs, fast_mode=True)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_scale_replaces_the_inverse_square_root_of_the_head_size_and_may_have_any_sign(name, scale):
    tensors = tensors_of(name, Case(1, 2, 1, 40, 40, 16))
    got = gradients(partial(build(name), scale=scale), *tensors)
    for key, x in gradients(lambda q, k, v: formula(scale * 4 * q, k, v), *tensors).items():
        torch.testing.assert_close(got[key], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_inputs_decide_the_precision_under_autocast(name):
    q, k, v, dout = tensors_of(name, Case(1, 2, 2, 40, 40, 16))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    with torch.autocast(q.device.type, torch.bfloat16):
        out = build(name)(*inputs).out
    expected = build(name)(*inputs).out
    assert torch.equal(out, expected)
    grads = (torch.autograd.grad(x, inputs, dout) for x in (out, expected))
    assert all(map(torch.equal, *grads))


def test_the_reference_is_what_torch_computes_in_fp64():
    case = CASES["grouped"]
    q, k, v, dout = case.tensors(torch.float32)

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    got = expect(case, torch.float32).exact
    for name, x in gradients(torchs, *(x.double() for x in (q, k, v, dout))).items():
        torch.testing.assert_close(got[name], x)
