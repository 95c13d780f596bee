"""Windows, documents, ALiBi, soft caps and sinks, alone and together, against the formula in fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import (
    IMPLEMENTATIONS,
    AttentionConfig,
    AttentionShape,
    Layout,
    Score,
    ScoreError,
    UnsupportedAttention,
    build_attention,
    documents,
    packed,
    varlen,
)
from attention.flex import FlexAttention
from attention.score import alibi_slopes, key_intervals, visible_pairs
from tests.attention.reference import KEY, Case, assert_accurate, flops_of_tiles, formula, gradients, published_slopes

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]
REPLAYING = {
    "naive": AttentionConfig("naive"),
    "tiled": AttentionConfig("tiled", block_q=16, block_k=48),
}
SQUARE = Case(2, 6, 2, 97, 97, 40)
EVERYTHING: Any = {"window": 30, "soft_cap": 3.0, "alibi": True, "sinks": True}
CASES = {
    "window": replace(SQUARE, window=20),
    "soft_cap": replace(SQUARE, soft_cap=1.5, spread=2.0),
    "soft_cap_full": replace(SQUARE, causal=False, soft_cap=1.5),
    "alibi": replace(SQUARE, alibi=True),
    "sinks": replace(SQUARE, sinks=True),
    "sinks_full": replace(SQUARE, causal=False, sinks=True),
    "documents": replace(SQUARE, documents=(30, 1, 50, 16)),
    "documents_full": replace(SQUARE, causal=False, documents=(30, 1, 50, 16)),
    "everything": replace(SQUARE, **EVERYTHING, documents=(30, 1, 50, 16)),
    "more_keys": Case(2, 4, 2, 61, 120, 32, **EVERYTHING, documents=(70, 50)),
    "more_queries": Case(2, 4, 1, 120, 61, 32, **EVERYTHING, documents=(21, 40)),
    "one_query": Case(2, 2, 2, 1, 75, 16, **EVERYTHING, documents=(40, 35)),
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.17])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", REPLAYING)
def test_error_is_a_small_multiple_of_the_plain_formulas(name, case, dropout, dtype):
    attend = build_attention(replace(REPLAYING[name], dropout=dropout))
    assert_accurate(attend, replace(case, dropout=dropout), dtype, factor=3.0)


@pytest.mark.parametrize(
    "case", [CASES["window"], CASES["documents"], CASES["documents_full"]], ids=lambda c: str(c.score)
)
def test_torch_is_asked_for_the_same_masks(case):
    assert_accurate(build_attention(AttentionConfig("sdpa")), case, torch.float32, factor=3.0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["everything", "documents_full", "more_queries"])
def test_flex_generates_the_same_masks_and_scores(name):
    case = CASES[name]
    q, k, v, _ = case.tensors(torch.float32)
    options: Any = {"score": case.score, "layout": case.layout(), "sinks": case.sink_logits(), "return_lse": True}
    got, expected = (build_attention(AttentionConfig(name))(q, k, v, **options) for name in ("flex", "naive"))
    torch.testing.assert_close(got.out, expected.out)
    torch.testing.assert_close(got.lse, expected.lse)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_makes_a_block_mask_again_when_the_documents_change():
    case = CASES["documents"]
    q, k, v, _ = case.tensors(torch.float32)
    flex, naive = FlexAttention(AttentionConfig("flex")), build_attention(AttentionConfig("naive"))
    starts = case.layout().document_starts
    assert starts is not None
    for _ in range(2):
        layout = documents(starts)
        torch.testing.assert_close(flex(q, k, v, layout=layout).out, naive(q, k, v, layout=layout).out)
        assert len(flex.block_masks) == 1
        starts.copy_(starts.flip(0))  # in place, as a CUDA graph's inputs are


def test_flex_refuses_dropout_and_a_backward_pass_on_a_cpu():
    with pytest.raises(UnsupportedAttention, match=r'name="flex" has no dropout; set dropout=0'):
        build_attention(AttentionConfig("flex", dropout=0.1))
    flex = build_attention(AttentionConfig("flex"))
    with pytest.raises(UnsupportedAttention, match=r'no backward pass on a CPU; choose name="tiled"'):
        flex.check(AttentionShape(32, 4, 2, torch.float32, torch.device("cpu"), training=True))
    q, k, v, _ = Case(1, 2, 2, 8, 8, 16).tensors(torch.float32)
    with pytest.raises(UnsupportedAttention, match=r"no backward pass on a CPU"):
        flex(q.requires_grad_(), k, v)


@pytest.mark.parametrize("shape", [(7, 7), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("name", REPLAYING)
def test_gradients_are_the_derivatives_of_the_output(name, shape):
    T, S = shape
    case = Case(2, 4, 2, T, S, 3, window=3, soft_cap=1.5, alibi=True, documents=(S - 2, 2))
    config = replace(REPLAYING[name], dropout=0.3)
    attend = build_attention(replace(config, block_q=2, block_k=3) if name == "tiled" else config)
    q, k, v, _ = case.tensors(torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v, torch.linspace(-1, 1, 4, dtype=torch.float64))]

    def run(q, k, v, sinks):
        score = replace(case.score, sinks=True)
        return attend(q, k, v, score=score, layout=case.layout(), sinks=sinks, dropout_key=KEY).out

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("name", REPLAYING)
def test_a_window_of_one_gives_each_query_its_own_value(name):
    q, k, v, _ = Case(2, 2, 2, 40, 40, 8).tensors(torch.float32)
    assert torch.equal(build_attention(REPLAYING[name])(q, k, v, score=Score(window=1)).out, v)


@pytest.mark.parametrize("blocks", [(3, 5), (64, 16), (7, 33), (1000, 1000)], ids=str)
def test_tile_sizes_change_nothing(blocks):
    case = CASES["everything"]
    results = []
    for config in (AttentionConfig("naive"), AttentionConfig("tiled", block_q=blocks[0], block_k=blocks[1])):
        attend = build_attention(config)

        def run(q, k, v, sinks, attend=attend):
            return attend(q, k, v, score=case.score, layout=case.layout(), sinks=sinks)

        sinks = torch.linspace(-1, 1, case.H, dtype=torch.float64)
        results.append(gradients(run, *case.tensors(torch.float64), sinks=sinks))
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 160, 160, 4, window=40),
        Case(1, 1, 1, 96, 160, 4, window=33),
        Case(1, 1, 1, 160, 160, 4, documents=(16, 70, 74)),
        Case(1, 1, 1, 160, 160, 4, causal=False, documents=(16, 70, 74)),
        Case(1, 1, 1, 160, 160, 4, window=20, documents=(100, 60)),
    ],
    ids=lambda c: f"{c.T}-{c.window}-{c.documents}-{c.causal}",
)
def test_tiles_in_which_nothing_is_seen_are_never_visited(case):
    attend = build_attention(AttentionConfig("tiled", block_q=16, block_k=32))
    tensors, layout = case.tensors(torch.float32), case.layout()
    with FlopCounterMode(display=False) as flops:
        gradients(lambda q, k, v: attend(q, k, v, score=case.score, layout=layout), *tensors)
    assert flops.get_total_flops() == flops_of_tiles(case, 16, 32)


@pytest.mark.parametrize("name", REPLAYING)
def test_lse_counts_the_sink_and_a_row_that_sees_nothing_has_nothing_else(name):
    case = Case(1, 4, 2, 60, 45, 8, sinks=True)
    q, k, v, _ = case.tensors(torch.float32)
    sinks = case.sink_logits()
    out, lse = build_attention(REPLAYING[name])(q, k, v, score=case.score, sinks=sinks, return_lse=True)
    assert sinks is not None
    assert lse is not None
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).mT / 8**0.5
    total = scores.exp().masked_fill(~case.visible()[:, None], 0.0).sum(-1) + sinks.double().exp()[:, None]
    torch.testing.assert_close(lse.double(), total.log(), rtol=1e-6, atol=1e-6)
    assert not out[:, :, :15].any()
    assert torch.equal(lse[0, :, :15], sinks[:, None].expand(4, 15))


@pytest.mark.parametrize("name", ["naive", "tiled", "sdpa", "flash"])
def test_sequences_of_any_length_prefill_in_one_call(name):
    bounds = [0, 5, 5, 38, 39, 64]
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if name == "flash" and torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(64, heads, 16, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2))
    attend, cu_seqlens = build_attention(AttentionConfig(name)), torch.tensor(bounds, dtype=torch.int32)
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
    with pytest.raises(ScoreError, match="must end at the row's length, 64"):
        varlen(attend, q, k, v, torch.tensor([0, 60]))
    with pytest.raises(ValueError, match=r"k \(60, .* must agree in total"):
        varlen(attend, q, k[:60], v[:60], cu_seqlens)


@pytest.mark.parametrize("name", REPLAYING)
def test_a_cut_of_the_queries_with_a_cut_of_the_keys_is_a_cut_of_the_whole(name):
    """With q_start and k_start, some rows of the queries and their keys give what the whole call gives there."""
    case = replace(CASES["everything"], sinks=False)
    attend = build_attention(REPLAYING[name])
    q, k, v, _ = case.tensors(torch.float64)
    whole = attend(q, k, v, score=case.score, layout=case.layout()).out
    for first, last in ((0, 40), (40, 97)):
        before = max(0, first - 29)  # keys that the window of 30 leaves out
        layout = case.layout()._replace(q_start=first, k_start=before)
        k_cut, v_cut = k[:, :, before:], v[:, :, before:]
        part = attend(q[:, :, first:last], k_cut, v_cut, score=case.score, layout=layout).out
        torch.testing.assert_close(part, whole[:, :, first:last], rtol=0, atol=1e-13)


def test_key_intervals_say_what_is_seen_of_any_cut():
    case = CASES["more_keys"]
    seen = key_intervals(case.score, case.layout(), case.T, case.S, "cpu")
    for rows, columns in (((0, 61), (0, 120)), ((3, 20), (40, 77))):
        expected = case.visible()[:, slice(*rows), slice(*columns)]
        mask = seen.mask(rows, columns)
        assert mask is not None
        assert torch.equal(mask[:, 0], expected)
        assert seen.meet(rows, columns) == expected.any()
        assert seen.cover(rows, columns) == expected.all()
    assert seen.cover((5, 7), (52, 60))


def test_visible_pairs_are_counted_with_the_diagonal_half():
    for window in (None, 1, 10, 64, 100):
        pairs = Case(1, 1, 1, 64, 64, 1, window=window).visible().sum().item()
        assert visible_pairs(Score(window=window), 64) == pairs - (64 if window is None else min(window, 64)) / 2


@pytest.mark.parametrize("n_heads", [1, 2, 6, 8, 12, 16, 25])
def test_slopes_are_the_published_ones(n_heads):
    torch.testing.assert_close(alibi_slopes(n_heads), torch.tensor(published_slopes(n_heads)))


@pytest.mark.parametrize("name", REPLAYING)
def test_given_slopes_replace_them(name):
    q, k, v, _ = Case(1, 2, 2, 20, 20, 8).tensors(torch.float32)
    attend, score = build_attention(REPLAYING[name]), Score(alibi=True)
    flat = attend(q, k, v, score=score, slopes=torch.zeros(2)).out
    assert torch.equal(flat, attend(q, k, v).out)
    assert not torch.allclose(flat, attend(q, k, v, score=score).out)


def test_everything_compiles_to_one_graph_that_new_documents_do_not_recompile():
    case = replace(CASES["everything"], T=40, S=40, documents=(10, 30))
    attend, sinks = build_attention(replace(REPLAYING["tiled"], dropout=0.1)), case.sink_logits()
    tensors = case.tensors(torch.float32)

    def run(starts, attend=attend.__call__):
        def call(q, k, v, sinks):
            return attend(q, k, v, score=case.score, layout=documents(starts), sinks=sinks, dropout_key=KEY)

        return gradients(call, *tensors, sinks=sinks)

    torch._dynamo.reset()
    compiled = torch.compile(attend.__call__, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((10, 30), (40,), (1, 2, 37)):
            starts = torch.tensor([sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)])
            starts = starts.int().expand(2, -1).contiguous()
            got, expected = run(starts, compiled), run(starts)
            for key in expected:
                torch.testing.assert_close(got[key], expected[key], rtol=1e-5, atol=1e-6)


FEATURES = {
    "full": (Score(causal=False), False, "causal=False"),
    "window": (Score(window=4), False, "window=4"),
    "soft_cap": (Score(soft_cap=5.0), False, "soft_cap=5.0"),
    "alibi": (Score(alibi=True), False, "alibi=True"),
    "sinks": (Score(sinks=True), False, "sinks=True"),
    "documents": (Score(), True, "data.documents"),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_what_an_implementation_does_not_support_is_refused_when_the_model_is_built(name, feature):
    score, has_documents, asked_by = FEATURES[feature]
    attend = build_attention(AttentionConfig(name))
    device = torch.device("cuda" if name == "flex" else "cpu")
    shape = AttentionShape(32, 4, 2, torch.float32, device, (Score(), score), has_documents)
    if feature in attend.supports:
        attend.check(shape)
        return
    with pytest.raises(UnsupportedAttention, match=f'name="{name}" does not support {asked_by}.*choose name='):
        attend.check(shape)
    q, k, v, _ = Case(1, 4, 2, 8, 8, 32).tensors(torch.float32)
    sinks = torch.zeros(4) if score.sinks else None
    layout = documents(torch.zeros(1, 8, dtype=torch.int32)) if has_documents else Layout()
    with pytest.raises(UnsupportedAttention, match=f'name="{name}" does not support {asked_by}'):
        attend(q, k, v, score=score, layout=layout, sinks=sinks)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"window": 0}, r"window=0 must be at least 1"),
        ({"window": 2.5}, r"window=2.5 must be a whole number"),
        ({"window": True}, r"window=True must be a whole number"),
        ({"causal": 1024}, r"causal=1024 must be true or false"),
        ({"soft_cap": True}, r"soft_cap=True must be a number"),
        ({"soft_cap": 0.0}, r"soft_cap=0.0 must be positive"),
        ({"soft_cap": float("nan")}, r"soft_cap=nan must be positive"),
        ({"soft_cap": float("inf")}, r"soft_cap=inf must be positive and finite"),
        ({"causal": False, "window": 3}, r"need causal=True"),
        ({"causal": False, "alibi": True}, r"need causal=True"),
    ],
)
def test_scores_that_mean_nothing_are_refused(options, complaint):
    with pytest.raises(ScoreError, match=complaint):
        Score(**options)


@pytest.mark.parametrize(
    ("bounds", "complaint"),
    [
        ([1, 8], r"cu_seqlens=\[1, 8\] must start at 0"),
        ([], r"cu_seqlens=\[\] must start at 0"),
        ([0, 5, 3, 8], r"must not decrease, as it does from 5 to 3"),
        ([0, 5], r"must end at the row's length, 8"),
        ([0, 5, 9], r"must end at the row's length, 8"),
        ([[0, 8]], r"cu_seqlens of shape \(1, 2\) and torch.int64 must be a 1-D tensor of integers"),
        ([0.0, 8.0], r"cu_seqlens of shape \(2,\) and torch.float32 must be a 1-D tensor of integers"),
    ],
)
def test_bounds_that_do_not_cut_the_row_are_refused(bounds, complaint):
    with pytest.raises(ScoreError, match=complaint):
        packed(torch.tensor(bounds, dtype=None if bounds else torch.int32), 8)


def test_bounds_and_starts_describe_the_same_documents():
    starts = torch.tensor([[0, 0, 2, 2, 2, 2, 2, 7]], dtype=torch.int32)
    ends = torch.tensor([[2, 2, 7, 7, 7, 7, 7, 8]], dtype=torch.int32)
    for layout in (packed(torch.tensor([0, 2, 2, 7, 8]), 8), documents(starts)):
        torch.testing.assert_close(layout.document_starts, starts)
        torch.testing.assert_close(layout.document_ends, ends)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"score": Score(alibi=True), "slopes": torch.ones(3)}, r"slopes of shape \(3,\).*each of 4 query heads"),
        ({"slopes": torch.ones(4)}, r"slopes of shape \(4,\) do not fit: .* has none"),
        ({"score": Score(sinks=True), "sinks": torch.ones(2)}, r"sinks of shape \(2,\).*each of 4 query heads"),
        ({"score": Score(sinks=True)}, r"needs sinks"),
        ({"layout": documents(torch.zeros(2, 7, dtype=torch.int32))}, r"shape \(2, 8 or more\); got \(\(2, 7\)"),
        ({"layout": documents(torch.zeros(1, 8, dtype=torch.int32))}, r"shape \(2, 8 or more\); got \(\(1, 8\)"),
        ({"layout": Layout(document_starts=torch.zeros(2, 8, dtype=torch.int32))}, r"got None"),
    ],
)
def test_tensors_that_do_not_fit_the_call_are_refused(options, complaint):
    q, k, v, _ = Case(2, 4, 2, 8, 8, 4).tensors(torch.float32)
    with pytest.raises(ValueError, match=complaint):
        build_attention(AttentionConfig("naive"))(q, k, v, **options)
