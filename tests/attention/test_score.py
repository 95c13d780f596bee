"""Scores and layouts: their meaning, refused combinations, flex, and the tiles that tiled visits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from attention import (
    IMPLEMENTATIONS,
    AttentionConfig,
    AttentionShape,
    Layout,
    Score,
    ScoreError,
    UnsupportedAttention,
    documents,
    packed,
)
from attention.adapters.flex import FlexAttention
from attention.score import visible_pairs
from attention.scores.alibi import alibi_slopes
from tests import flash_attn_stand_in
from tests.attention.contract import SCORE_CASES
from tests.attention.reference import Case, build, published_slopes


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "T"), [("everything", 150), ("documents_full", 150), ("everything_more_queries", 140)]
)
def test_flex_generates_the_same_masks_and_scores(name, T):
    case = replace(SCORE_CASES[name], T=T)
    q, k, v, _ = case.tensors(torch.float32)
    options: Any = {"score": case.score, "layout": case.layout(), "sinks": case.sink_logits(), "return_lse": True}
    assert_close(*(build(name)(q, k, v, **options) for name in ("flex", "naive")))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("inference", [False, True])
def test_flex_makes_a_block_mask_again_when_the_documents_change(inference):
    case = Case(2, 6, 2, 97, 97, 40, documents=(30, 1, 50, 16))
    q, k, v, _ = case.tensors(torch.float32)
    flex, naive = FlexAttention(AttentionConfig("flex")), build("naive")
    with torch.inference_mode(inference):  # torch does not count the changes of a tensor that is made in it
        starts = case.layout().document_starts
        assert starts is not None
        for _ in range(2):
            layout = documents(starts)
            assert_close(flex(q, k, v, layout=layout).out, naive(q, k, v, layout=layout).out)
            assert len(flex.block_masks) == 1
            starts.copy_(starts.flip(0))  # in place, as a CUDA graph's inputs are


def test_flex_refuses_dropout_and_a_backward_pass_on_a_cpu():
    with pytest.raises(UnsupportedAttention, match=r'name="flex" has no dropout; set dropout=0'):
        build("flex", dropout=0.1)
    flex = build("flex")
    with pytest.raises(UnsupportedAttention, match=r'no backward pass on a CPU; choose name="tiled"'):
        flex.check(AttentionShape(32, 4, 2, torch.float32, torch.device("cpu"), training=True))
    q, k, v, _ = Case(1, 2, 2, 8, 8, 16).tensors(torch.float32)
    with pytest.raises(UnsupportedAttention, match=r"no backward pass on a CPU"):
        flex(q.requires_grad_(), k, v)


def test_visible_pairs_are_counted_with_the_diagonal_half():
    for window in (None, 1, 10, 64, 100):
        pairs = Case(1, 1, 1, 64, 64, 1, window=window).visible().sum().item()
        assert visible_pairs(Score(window=window), 64) == pairs - (64 if window is None else min(window, 64)) / 2


@pytest.mark.parametrize("n_heads", [1, 2, 6, 8, 12, 16, 25])
def test_slopes_are_the_published_ones(n_heads):
    assert_close(alibi_slopes(n_heads), torch.tensor(published_slopes(n_heads)))


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
def test_a_score_that_an_implementation_lacks_is_refused_when_the_model_is_built(name, feature, monkeypatch):
    if name == "varlen":
        flash_attn_stand_in.install(monkeypatch)
    score, has_documents, asked_by = FEATURES[feature]
    attend = build(name)
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
        ({"causal": False, "window": 3}, r"needs causal=True"),
        ({"causal": False, "alibi": True}, r"needs causal=True"),
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
        ([0, 5, 3, 8], r"cu_seqlens=\[0, 5, 3, 8\] must start at 0, never decrease"),
        ([0, 5], r"end at the row's length, 8"),
        ([0, 5, 9], r"end at the row's length, 8"),
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
        assert_close(layout.document_starts, starts)
        assert_close(layout.document_ends, ends)


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
        build("naive")(q, k, v, **options)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
def test_numbers_of_numpy_and_tensors_without_axes_are_numbers(number, compiled):
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    attend = build("naive")
    options: dict[str, Any] = {"soft_cap": number(2.0), "window": np.int64(3), "sinks": np.bool_(False)}
    score, plain = Score(**options), Score(True, 3, 2.0)
    assert score == plain
    assert [type(x) for x in score.values] == [type(x) for x in plain.values]
    call = torch.compile(attend, backend="eager") if compiled else attend
    assert torch.equal(call(q, k, v, score=score).out, attend(q, k, v, score=plain).out)
