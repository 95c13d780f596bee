"""Windows, documents, ALiBi, soft caps and sinks in the Triton kernels, at small sizes, as in test_flash.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import AttentionConfig, Layout, Score, build_attention, documents
from attention.dropout import drop_threshold
from attention.flash.configs import Extras, Options
from attention.flash.op import flash_forward
from tests.attention.reference import KEY, Case, assert_accurate, gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SQUARE = Case(1, 2, 1, 150, 150, 16)
EVERYTHING: Any = {"window": 70, "soft_cap": 3.0, "alibi": True, "sinks": True}
CASES = {
    "window": replace(SQUARE, window=20),
    "window_of_tiles": replace(SQUARE, window=64),
    "soft_cap": replace(SQUARE, soft_cap=1.5, spread=2.0),
    "soft_cap_full": replace(SQUARE, causal=False, soft_cap=1.5),
    "alibi": replace(SQUARE, H=3, alibi=True),
    "sinks": replace(SQUARE, sinks=True),
    "sinks_full": replace(SQUARE, causal=False, sinks=True),
    "documents": replace(SQUARE, B=2, documents=(64, 1, 35, 50)),
    "documents_full": replace(SQUARE, B=2, causal=False, documents=(64, 1, 35, 50)),
    "window_documents": replace(SQUARE, window=40, documents=(90, 60)),
    "alibi_documents_sinks": replace(SQUARE, alibi=True, sinks=True, documents=(30, 120)),
    "everything": replace(SQUARE, **EVERYTHING, documents=(30, 120)),
    "more_keys": Case(2, 4, 2, 61, 140, 24, **EVERYTHING, documents=(70, 70)),
    "more_queries": Case(2, 4, 1, 140, 61, 24, **EVERYTHING, documents=(21, 40)),
    "one_query": Case(2, 2, 2, 1, 75, 16, **EVERYTHING, documents=(40, 35)),
}
COMBINED = ("everything", "more_keys", "more_queries", "one_query")


def flash(dropout: float = 0.0):
    return build_attention(AttentionConfig("flash", dropout=dropout))


# In fp16: the interpreter rounds to bf16 by cutting off, which alone is twice the error of rounding.
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_error_is_a_small_multiple_of_the_plain_formulas(case):
    assert_accurate(flash(), case, torch.float16, DEVICE, factor=3.0)


@pytest.mark.parametrize("name", ["window", "documents_full", *COMBINED])
def test_dropout_numbers_rows_and_columns_of_the_call(name):
    assert_accurate(flash(0.17), replace(CASES[name], dropout=0.17), torch.float16, DEVICE, factor=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft_cap", "alibi", *COMBINED])
def test_error_in_fp32(name):
    assert_accurate(flash(0.17), replace(CASES[name], dropout=0.17), torch.float32, DEVICE, factor=3.0)


CAPPED: Any = {"soft_cap": 1.5, "dropout": 0.17}


@pytest.mark.parametrize(
    "case",
    [replace(CASES["window_documents"], **CAPPED), Case(1, 2, 1, 100, 61, 24, documents=(21, 40), **CAPPED)],
    ids=["window_documents", "more_queries"],
)
def test_one_maximum_for_all_tiles_is_as_accurate(case):
    """In fp32, because fp16 uses the running maximum."""
    assert_accurate(flash(0.17), case, torch.float32, DEVICE, factor=3.0)


@pytest.mark.parametrize("soft_cap", [60.0, 61.0], ids=["one_maximum", "running_maximum"])
@pytest.mark.parametrize("n_low", [2, 70], ids=["in_the_first_tile", "after_it"])
def test_scores_at_the_soft_cap_neither_overflow_nor_vanish(n_low, soft_cap):
    """The first keys score -c, later ones c or -c: a row is the mean of its keys at c, or of all if it sees none."""
    T = 150
    high = torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.5
    high[:n_low], high[n_low] = False, True
    q = torch.full((1, 1, T, 16), 100.0, device=DEVICE)
    k = torch.where(high, 100.0, -100.0).to(DEVICE)[:, None].expand(1, 1, T, 16).contiguous()
    v = torch.randn(1, 1, T, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out, lse = flash()(q, k, v, score=Score(soft_cap=soft_cap), return_lse=True)
    counts = torch.tril(high.double().expand(T, T))
    best = torch.where(high.cummax(0).values, soft_cap, -soft_cap).double()
    counts[:n_low] = torch.tril(torch.ones(T, T, dtype=torch.double))[:n_low]
    expected = (counts @ v[0, 0].double().cpu()) / counts.sum(1, keepdim=True)
    torch.testing.assert_close(out[0, 0].double().cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[0, 0].double().cpu(), best + counts.sum(1).log(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("T", [63, 64, 65, 128, 129])
def test_windows_that_end_at_the_edge_of_a_tile(T):
    case = Case(1, 1, 1, T, T, 16)
    for window in (1, 63, 64, 65, T):
        assert_accurate(flash(), replace(case, window=window), torch.float16, DEVICE, factor=3.0)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 256, 256, 16, window=40),
        Case(1, 1, 1, 128, 256, 16, window=40),
        Case(1, 1, 1, 256, 256, 16, documents=(64, 128, 64)),
        Case(1, 1, 1, 256, 256, 16, causal=False, documents=(64, 128, 64)),
    ],
    ids=lambda c: f"{c.T}-{c.window}-{c.documents}-{c.causal}",
)
def test_tiles_in_which_nothing_is_seen_are_never_read(case):
    """A NaN in a tile that is read reaches the results, even where its weight is zero."""
    q, k, v, do = (x.to(DEVICE) for x in case.tensors(torch.float16))
    seen = case.visible()[0]
    offset, tile = case.S - case.T, 64

    def run(*tensors: Tensor) -> dict[str, Tensor]:
        return gradients(lambda *qkv: flash()(*qkv, score=case.score, layout=case.layout(DEVICE)), *tensors)

    clean = run(q, k, v, do)
    for start in range(0, case.S, tile):
        keys = slice(start, start + tile)
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, :, keys] = bad_v[:, :, keys] = math.nan
        blocks = seen[:, keys].unflatten(0, (-1, tile)).any(2).any(1)  # tiles of queries that see one of the keys
        got = run(q, bad_k, bad_v, do)
        for name in ("out", "dq"):
            unaffected = ~blocks.repeat_interleave(tile).to(DEVICE)
            assert torch.equal(got[name][:, :, unaffected], clean[name][:, :, unaffected]), (start, name)
    for start in range(0, case.T, tile):
        rows = slice(start, start + tile)
        bad_q, bad_do = q.clone(), do.clone()
        bad_q[:, :, rows] = bad_do[:, :, rows] = math.nan
        blocks = seen[rows].unflatten(1, (-1, tile)).any(2).any(0)  # tiles of keys that one of the queries sees
        got = run(bad_q, k, v, bad_do)
        for name in ("dk", "dv"):
            unaffected = ~blocks.repeat_interleave(tile).to(DEVICE)
            assert torch.equal(got[name][:, :, unaffected], clean[name][:, :, unaffected]), (start, offset, name)


@pytest.mark.parametrize("documents", [(), (90, 60)])
def test_a_cut_of_the_queries_with_a_cut_of_the_keys_is_a_cut_of_the_whole(documents):
    case = replace(CASES["everything"], documents=documents)
    sinks = case.sink_logits(DEVICE)
    q, k, v, _ = (x.to(DEVICE) for x in case.tensors(torch.float32))
    naive = build_attention(AttentionConfig("naive"))
    whole = naive(q, k, v, score=case.score, layout=case.layout(DEVICE), sinks=sinks)
    for first, last in ((0, 80), (80, 150)):
        before = max(0, first - 69)  # keys that the window of 70 leaves out
        layout = case.layout(DEVICE)._replace(q_start=first, k_start=before)
        k_cut, v_cut = k[:, :, before:], v[:, :, before:]
        part = flash()(q[:, :, first:last], k_cut, v_cut, score=case.score, layout=layout, sinks=sinks)
        torch.testing.assert_close(part.out, whole.out[:, :, first:last], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", [Score(), Score(causal=False), Score(window=33)], ids=str)
@pytest.mark.parametrize(("q_start", "k_start"), [(64, 0), (0, 64), (100, 20), (10, 100), (200, 0)])
def test_queries_and_keys_that_stand_anywhere(score, q_start, k_start):
    q, k, v, do = (x.to(DEVICE) for x in Case(1, 1, 1, 70, 80, 16).tensors(torch.float32))
    layout = Layout(q_start=q_start, k_start=k_start)
    got, expected = (
        gradients(lambda q, k, v, a=attend: a(q, k, v, score=score, layout=layout), *tensors)
        for attend, tensors in (
            (flash(), (q, k, v, do)),
            (build_attention(AttentionConfig("naive")), [x.double() for x in (q, k, v, do)]),
        )
    )
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=1e-4, atol=1e-5)


def test_lse_counts_the_sink_and_a_row_that_sees_nothing_has_nothing_else():
    case = Case(1, 4, 2, 60, 45, 16, sinks=True)
    q, k, v, _ = (x.to(DEVICE) for x in case.tensors(torch.float32))
    sinks = case.sink_logits(DEVICE)
    out, lse = flash()(q, k, v, score=case.score, sinks=sinks, return_lse=True)
    assert sinks is not None
    assert lse is not None
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).mT / 4
    total = scores.exp().masked_fill(~case.visible()[:, None].to(DEVICE), 0.0).sum(-1) + sinks.double().exp()[:, None]
    torch.testing.assert_close(lse.double(), total.log(), rtol=1e-6, atol=1e-6)
    assert not out[:, :, :15].any()
    torch.testing.assert_close(lse[0, :, :15], sinks[:, None].expand(4, 15))


def test_without_keys_the_sink_is_all_there_is():
    sinks = torch.tensor([0.5, -1.0], device=DEVICE, requires_grad=True)
    q, k = torch.ones(1, 2, 3, 16, device=DEVICE), torch.ones(1, 2, 0, 16, device=DEVICE)
    out, lse = flash()(q, k, k, score=Score(sinks=True), sinks=sinks, return_lse=True)
    assert lse is not None
    assert torch.equal(lse[0], sinks.detach()[:, None].expand(2, 3))
    out.sum().backward()
    assert not out.any()
    assert sinks.grad is not None
    assert not sinks.grad.any()


def test_given_slopes_replace_those_of_the_paper():
    q, k, v, _ = (x.to(DEVICE) for x in Case(1, 2, 2, 40, 40, 16).tensors(torch.float32))
    slopes = torch.tensor([0.3, 0.0], device=DEVICE)
    naive, got = (
        build_attention(AttentionConfig(name))(q, k, v, score=Score(alibi=True), slopes=slopes).out
        for name in ("naive", "flash")
    )
    torch.testing.assert_close(got, naive, rtol=1e-4, atol=1e-5)


def test_new_documents_recompile_nothing():
    case = replace(CASES["everything"], T=40, S=40, documents=(10, 30))
    attend, sinks = flash(0.1), case.sink_logits(DEVICE)
    tensors = [x.to(DEVICE) for x in case.tensors(torch.float32)]

    def run(starts: Tensor, attend: Any = attend.__call__) -> dict[str, Tensor]:
        def call(q, k, v, sinks):
            return attend(q, k, v, score=case.score, layout=documents(starts), sinks=sinks, dropout_key=KEY)

        return gradients(call, *tensors, sinks=sinks)

    torch._dynamo.reset()
    compiled = torch.compile(attend.__call__, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((10, 30), (1, 2, 37)):
            starts = torch.tensor([sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)])
            starts = starts.int().expand(1, -1).contiguous().to(DEVICE)
            got, expected = run(starts, compiled), run(starts)
            for name, x in expected.items():
                torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6)


def test_the_operator_keeps_torchs_rules_with_all_its_tensors():
    q, k, v = (x.to(DEVICE).requires_grad_() for x in Case(1, 2, 1, 40, 40, 16).tensors(torch.float32)[:3])
    starts = torch.zeros(1, 40, dtype=torch.int32, device=DEVICE)
    extras = Extras(
        key=KEY.pack(torch.device(DEVICE)),
        slopes=torch.tensor([0.5, 0.25], device=DEVICE),
        sinks=torch.tensor([0.5, -0.5], device=DEVICE, requires_grad=True),
        starts=starts,
        ends=starts + 40,
    )
    options = Options(
        causal=True,
        scale=0.25,
        threshold=drop_threshold(0.1),
        tf32=False,
        window=30,
        soft_cap=2.0,
        q_start=0,
        k_start=0,
    )
    torch.library.opcheck(flash_forward, (q, k, v, *extras, *options))
