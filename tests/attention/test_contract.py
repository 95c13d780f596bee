"""Every registered implementation against the formula in fp64: the check's judge finds nothing but rounding."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from attention import AttentionConfig, Score, documents, varlen
from attention.check.behaviour import CHECKS
from attention.check.cases import MEMORY
from attention.check.run import Session, prepare
from tests.attention.contract import CASES, NAMES, REPLAYING, RETURNING_LSE, SCORE_CASES, build, device_of, supporting
from tests.attention.reference import (
    KEY,
    Case,
    assert_accurate,
    assert_cut_is_accurate,
    assert_packed_is_accurate,
    formula,
    gradients,
)
from tests.attention.subjects import assert_judged_right, subject_of
from tests.equal import assert_equal

EACH_IMPLEMENTATION = pytest.mark.parametrize("name", NAMES)
EVERYTHING = SCORE_CASES["everything"]
HAVING_ALL = supporting(*EVERYTHING.score.features(), *EVERYTHING.layout().features())
FULL = {f"{x}_full": replace(CASES[x], causal=False) for x in ("grouped", "more_keys", "more_queries", "few_keys")}


def tensors_of(name: str, case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v and the gradient of out, where the implementation runs."""
    return case.tensors(dtype, device_of(name))


def test_the_implementations_of_this_repository_have_what_they_are_for():
    """So that none leaves the tests below by refusing."""
    assert {"naive", "tiled", "flash", "sdpa"} <= set(NAMES)
    assert {"naive", "tiled", "flash"} <= set(REPLAYING) & set(RETURNING_LSE)
    assert {"naive", "tiled", "flash"} <= set(supporting("full", "window", "soft_cap", "alibi", "sinks", "documents"))


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Each problem in one precision, and a fifth with dropout: all pairs of a kind, a precision and dropout occur.
PROBLEMS = [
    (label, replace(case, dropout=0.17 * (number % 5 == 0)), DTYPES[number % 3])
    for number, (label, case) in enumerate((CASES | FULL | SCORE_CASES).items())
]


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        pytest.param(name, replace(case, dropout=case.dropout * (name in REPLAYING)), dtype, id=f"{name}-{label}")
        for label, case, dtype in PROBLEMS
        for name in supporting(*case.score.features(), *case.layout().features())
    ],
)
def test_errors_are_rounding_with_exactly_the_mask_dropped(name, case, dtype):
    assert_accurate(build(name, dropout=case.dropout), case, dtype, device_of(name), name in RETURNING_LSE)


LARGE_SCORES = {
    "far above zero": Case(1, 2, 1, 100, 100, 64, offset=1e4),
    "far below zero": Case(1, 2, 1, 100, 100, 64, offset=-1e4),
    "far apart": Case(1, 2, 1, 100, 100, 64, spread=1e4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", LARGE_SCORES)
@EACH_IMPLEMENTATION
def test_scores_of_ten_thousand_neither_overflow_nor_lose_accuracy(name, kind, dtype):
    case = LARGE_SCORES[kind]
    q, k, _, _ = case.tensors(dtype)
    assert (q.double() @ k.double().mT).abs().max() > torch.finfo(torch.float16).max  # q k^T alone would overflow
    assert_accurate(build(name), case, dtype, device_of(name), name in RETURNING_LSE)


@pytest.mark.parametrize("name", REPLAYING)
def test_activation_checkpointing_draws_the_same_mask_again(name):
    attend = build(name, dropout=0.3)
    q, k, v, dout = tensors_of(name, Case(1, 2, 1, 40, 40, 16))
    run = partial(attend, dropout_key=KEY)
    got = gradients(lambda q, k, v: checkpoint(run, q, k, v, use_reentrant=False), q, k, v, dout)
    assert_equal(got, gradients(run, q, k, v, dout))


@pytest.mark.parametrize("name", REPLAYING)
def test_nothing_is_dropped_without_a_key(name):
    q, k, v, _ = tensors_of(name, Case(1, 2, 2, 30, 30, 8))
    assert torch.equal(build(name, dropout=0.5)(q, k, v).out, build(name)(q, k, v).out)


CALLS = {memory: Case(2, 2, 1, 50, 50, 24, memory=memory) for memory in MEMORY}
CALLS |= {"slopes other than the paper's": Case(H=3, H_kv=1, T=40, S=40, alibi=True), "scale": Case(scale=-0.3)}


@pytest.mark.parametrize("call", CALLS)
@EACH_IMPLEMENTATION
def test_any_memory_layout_slopes_and_scale_are_supported(name, call):
    subject = subject_of(AttentionConfig(name))
    if subject.supports(CALLS[call]):
        assert_judged_right(subject, CALLS[call], device_of(name))


@pytest.mark.parametrize("name", RETURNING_LSE)
def test_the_log_sum_exp_is_fp32_without_a_gradient_and_minus_infinity_for_rows_that_see_nothing(name):
    q, k, v, _ = tensors_of(name, Case(1, 4, 2, 60, 45, 16), torch.float16)
    lse = build(name)(q.requires_grad_(), k, v, return_lse=True).lse
    assert lse is not None
    assert lse.dtype == torch.float32
    assert not lse.requires_grad
    assert (lse[:, :, :15] == -torch.inf).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sdpa"])  # torch adds -inf to hidden scores
def test_values_that_are_not_finite_reach_the_rows_that_see_them(name):
    """A score of -inf has weight 0 where a row has other scores, and gives 0 / 0 where it has none."""
    session = Session(subject_of(AttentionConfig(name)), torch.device(device_of(name)), float("inf"), stream=None)
    prepare(session, ("fp32",))
    found = CHECKS["NaN and infinity"](session)
    assert (found.status, found.calls) == ("ok", 9), found.detail


@pytest.mark.parametrize(("B", "T", "S"), [(0, 9, 9), (2, 9, 0), (2, 0, 9)])
@EACH_IMPLEMENTATION
def test_empty_inputs_give_empty_or_zero_results(name, B, T, S):
    q, k = torch.ones(B, 4, T, 16, device=device_of(name)), torch.ones(B, 2, S, 16, device=device_of(name))
    got = gradients(build(name), q, k, k, q)
    assert [got[x].shape for x in ("out", "dq", "dk", "dv")] == [q.shape, q.shape, k.shape, k.shape]
    assert not any(x.any() for x in got.values())


@EACH_IMPLEMENTATION
def test_a_scale_of_zero_gives_all_visible_keys_the_same_weight(name):
    tensors = tensors_of(name, Case(1, 2, 1, 40, 40, 16))
    got = gradients(partial(build(name), scale=0.0), *tensors)
    assert_close(got, gradients(lambda q, k, v: formula(0 * q, k, v), *tensors), rtol=1e-4, atol=1e-5)


@EACH_IMPLEMENTATION
def test_the_inputs_decide_the_precision_under_autocast(name):
    tensors = tensors_of(name, Case(1, 2, 2, 40, 40, 16))

    def under_autocast(*qkv):
        with torch.autocast(device_of(name), torch.bfloat16):
            return build(name)(*qkv)

    assert_equal(gradients(under_autocast, *tensors), gradients(build(name), *tensors))


@pytest.mark.parametrize("name", sorted({*RETURNING_LSE} & {*supporting("sinks")}))
def test_without_keys_the_sink_is_all_there_is(name):
    """In the first rows, which stand before all keys, and in all where there is none."""
    sinks = torch.tensor([0.5, -1.0], device=device_of(name), requires_grad=True)
    for T, S in ((30, 20), (3, 0)):
        q, k, v, _ = tensors_of(name, Case(1, 2, 2, T, S, 16))
        out, lse = build(name)(q, k, v, score=Score(sinks=True), sinks=sinks, return_lse=True)
        assert lse is not None
        assert_close(lse[0, :, : T - S], sinks.detach()[:, None].expand(2, T - S))
        assert not out[:, :, : T - S].any()
        (gradient,) = torch.autograd.grad(out[:, :, : T - S].sum(), sinks, allow_unused=True)
        assert gradient is None or not gradient.any()


@pytest.mark.parametrize("name", supporting("window", "documents"))
def test_sequences_of_any_length_prefill_in_one_call(name):
    case = Case(1, 4, 2, 64, 64, 16, window=20, documents=(5, 0, 33, 1, 25))
    assert_packed_is_accurate(build(name), case, torch.float32, device_of(name))


def test_sequences_that_do_not_fill_the_call_are_refused():
    q, k, v = (torch.ones(64, heads, 16) for heads in (4, 2, 2))
    with pytest.raises(ValueError, match=r"k \(60, .* must agree in total"):
        varlen(build("naive"), q, k[:60], v[:60], torch.tensor([0, 64]))


@pytest.mark.parametrize("documents", [(), (90, 60)], ids=["one_document", "two_documents"])
@pytest.mark.parametrize("name", HAVING_ALL)
def test_a_cut_of_the_queries_with_a_cut_of_the_keys_is_a_cut_of_the_whole(name, documents):
    """The keys of a cut include all that its queries see through the window of 70."""
    case = replace(EVERYTHING, documents=documents)
    for rows, columns in (((0, 80), (0, 150)), ((80, 150), (11, 150))):
        assert_cut_is_accurate(build(name), case, rows, columns, torch.float32, device_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*REPLAYING} & {*HAVING_ALL}))
def test_everything_compiles_to_one_graph_that_neither_documents_nor_a_key_recompile(name):
    case = replace(EVERYTHING, T=40, S=40, documents=(10, 30))
    device, attend = device_of(name), build(name, dropout=0.1)
    tensors, sinks = tensors_of(name, case), case.sink_logits(device)

    def results(starts, step, attend):
        def call(q, k, v, sinks):
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
            assert_close(got, expected, rtol=1e-5, atol=1e-6)
