"""Every registered implementation with windows, documents, ALiBi, soft caps and sinks, alone and together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Score, ScoreError, documents, varlen
from tests.attention.contract import (
    IN_FP64,
    REPLAYING,
    RETURNING_LSE,
    SCORE_CASES,
    build,
    device_of,
    factor,
    supporting,
)
from tests.attention.reference import KEY, Case, assert_accurate, formula, gradients, log_sum_exp

EVERYTHING = SCORE_CASES["everything"]
HAVING_ALL = supporting(*EVERYTHING.score.features(), *EVERYTHING.layout().features())


def tensors_of(name: str, case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v and the gradient of out, where the implementation runs."""
    return case.tensors(dtype, device_of(name))


# In bf16 only what torch computes: Triton's interpreter cuts off, which alone is twice the error of rounding.
@pytest.mark.parametrize(
    ("name", "case", "dtype", "dropout"),
    [
        pytest.param(name, case, dtype, dropout * (name in REPLAYING), id=f"{name}-{label}-{dtype}")
        for label, case in SCORE_CASES.items()
        for dtype, dropout in ((torch.float32, 0.17), (torch.float16, 0.0), (torch.bfloat16, 0.0))
        for name in supporting(*case.score.features(), *case.layout().features())
        if dtype != torch.bfloat16 or name in IN_FP64
    ],
)
def test_error_is_a_small_multiple_of_the_plain_formulas(name, case, dtype, dropout):
    case = replace(case, dropout=dropout)
    assert_accurate(build(name, dropout=dropout), case, dtype, device_of(name), factor(name, case, dtype))


@pytest.mark.parametrize("shape", [(7, 7), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("name", sorted({*IN_FP64} & {*REPLAYING} & {*HAVING_ALL}))
def test_gradients_are_the_derivatives_of_the_output(name, shape):
    T, S = shape
    case = Case(2, 4, 2, T, S, 3, window=3, soft_cap=1.5, alibi=True, sinks=True, documents=(S - 2, 2))
    attend, layout = build(name, dropout=0.3), case.layout(device_of(name))
    q, k, v, _ = tensors_of(name, case, torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.linspace(-1, 1, 4, dtype=torch.float64, device=q.device))]

    def out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, score=case.score, layout=layout, sinks=sinks, dropout_key=KEY).out

    assert torch.autograd.gradcheck(out, inputs, fast_mode=True)


@pytest.mark.parametrize("name", supporting("window"))
def test_with_a_window_of_one_the_output_is_the_value_at_the_same_position(name):
    q, k, v, _ = tensors_of(name, Case(2, 2, 2, 70, 70, 16))
    assert torch.equal(build(name)(q, k, v, score=Score(window=1)).out, v)


@pytest.mark.parametrize("name", sorted({*RETURNING_LSE} & {*HAVING_ALL}))
def test_lse_counts_the_sink_and_a_row_that_sees_nothing_has_nothing_else(name):
    case = Case(1, 4, 2, 60, 45, 16, soft_cap=1.5, sinks=True)
    q, k, v, _ = tensors_of(name, case)
    sinks = case.sink_logits(device_of(name))
    out, lse = build(name)(q, k, v, score=case.score, sinks=sinks, return_lse=True)
    assert lse is not None
    assert sinks is not None
    expected = log_sum_exp(q.double(), k.double(), case, sinks.double())
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=2e-6)
    assert not out[:, :, :15].any()
    torch.testing.assert_close(lse[0, :, :15], sinks[:, None].expand(4, 15))


@pytest.mark.parametrize("name", sorted({*RETURNING_LSE} & {*supporting("sinks")}))
def test_without_keys_the_sink_is_all_there_is(name):
    device = device_of(name)
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    q, k = torch.ones(1, 2, 3, 16, device=device), torch.ones(1, 2, 0, 16, device=device)
    out, lse = build(name)(q, k, k, score=Score(sinks=True), sinks=sinks, return_lse=True)
    assert lse is not None
    assert torch.equal(lse[0], sinks.detach()[:, None].expand(2, 3))
    assert not out.any()
    (gradient,) = torch.autograd.grad(out.sum(), sinks, allow_unused=True)
    assert gradient is None or not gradient.any()


@pytest.mark.parametrize("name", supporting("window", "documents"))
def test_sequences_of_any_length_prefill_in_one_call(name):
    bounds = [0, 5, 5, 38, 39, 64]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(64, heads, 16, generator=generator).to(device_of(name)).requires_grad_() for heads in (4, 2, 2)
    )
    attend, cu_seqlens = build(name), torch.tensor(bounds, dtype=torch.int32)
    out = varlen(attend, q, k, v, cu_seqlens, score=Score(window=20)).out
    assert out.shape == q.shape
    alone = [
        formula(*(x[first:last].transpose(0, 1)[None] for x in (q, k, v)), case=Case(1, 4, 2, n, n, 16, window=20))
        for first, last in pairwise(bounds)
        if (n := last - first)
    ]
    expected = torch.cat([x[0].transpose(0, 1) for x in alone])
    torch.testing.assert_close(out, expected)
    got, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_sequences_that_do_not_fill_the_call_are_refused():
    q, k, v = (torch.ones(64, heads, 16) for heads in (4, 2, 2))
    with pytest.raises(ScoreError, match="must end at the row's length, 64"):
        varlen(build("naive"), q, k, v, torch.tensor([0, 60]))
    with pytest.raises(ValueError, match=r"k \(60, .* must agree in total"):
        varlen(build("naive"), q, k[:60], v[:60], torch.tensor([0, 64]))


@pytest.mark.parametrize("documents", [(), (90, 60)], ids=["one_document", "two_documents"])
@pytest.mark.parametrize("name", HAVING_ALL)
def test_a_cut_of_the_queries_with_a_cut_of_the_keys_is_a_cut_of_the_whole(name, documents):
    """With q_start and k_start, some rows of the queries and their keys give what the formula gives there."""
    case = replace(EVERYTHING, documents=documents)
    sinks = case.sink_logits(device_of(name))
    q, k, v, _ = tensors_of(name, case)
    whole = formula(q.double(), k.double(), v.double(), sinks, case=case)
    for first, last in ((0, 80), (80, 150)):
        before = max(0, first - 69)  # keys that the window of 70 leaves out
        layout = case.layout(device_of(name))._replace(q_start=first, k_start=before)
        k_cut, v_cut = k[:, :, before:], v[:, :, before:]
        part = build(name)(q[:, :, first:last], k_cut, v_cut, score=case.score, layout=layout, sinks=sinks)
        torch.testing.assert_close(part.out.double(), whole[:, :, first:last], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", supporting("alibi"))
def test_given_slopes_replace_those_of_the_paper(name):
    q, k, v, _ = tensors_of(name, Case(1, 2, 2, 40, 40, 16))
    slopes = torch.tensor([0.3, 0.0], device=q.device)
    got = build(name)(q, k, v, score=Score(alibi=True), slopes=slopes).out
    distance = (torch.arange(40)[:, None] - torch.arange(40)).to(q.device)
    scores = q.double() @ k.double().mT / 4 - slopes[:, None, None] * distance
    expected = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v.double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted({*REPLAYING} & {*HAVING_ALL}))
def test_everything_compiles_to_one_graph_that_neither_documents_nor_a_key_recompile(name):
    case = replace(EVERYTHING, T=40, S=40, documents=(10, 30))
    device, attend = device_of(name), build(name, dropout=0.1)
    tensors, sinks = tensors_of(name, case), case.sink_logits(device)

    def results(starts: Tensor, step: Tensor, attend: Any) -> dict[str, Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
            key = replace(KEY, step=step)
            return attend(q, k, v, score=case.score, layout=documents(starts), sinks=sinks, dropout_key=key)

        return gradients(call, *tensors, sinks=sinks)

    torch._dynamo.reset()
    compiled = torch.compile(attend.__call__, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step, lengths in enumerate(((10, 30), (1, 2, 37))):
            starts = torch.tensor([sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)])
            starts = starts.int().expand(1, -1).contiguous().to(device)
            got, expected = (results(starts, torch.tensor(step), x) for x in (compiled, attend))
            for key, x in expected.items():
                torch.testing.assert_close(got[key], x, rtol=1e-5, atol=1e-6)
