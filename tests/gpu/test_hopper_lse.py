"""The log-sum-exp of the Hopper kernels on a Hopper GPU, forced, and rows that see no key, for which it is the sink."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import AttentionOutput, Layout, Score
from tests.attention.reference import KEY, Case, assert_accurate, gradients, log_sum_exp
from tests.gpu.test_flash import SCORES
from tests.gpu.test_hopper import DROPOUT, flash

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "sinks_full": {"causal": False, "sinks": True},
    "more_queries": {"T": 700},
    "more_queries_sinks": {"T": 700, "sinks": True},
    **SCORES,
}


def assert_log_sum_exp(lse: Tensor | None, q: Tensor, k: Tensor, case: Case) -> None:
    """Scores are sums in fp32, but for those of a soft cap c: the hardware's tanh is off by up to 2^-11 of itself."""
    assert lse is not None
    exact = log_sum_exp(q.double(), k.double(), case, case.sink_logits("cuda"))
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-4 + 2**-11 * (case.soft_cap or 0.0))


@DROPOUT
@pytest.mark.parametrize("D", [64, 65, 96, 111, 128, 256])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_log_sum_exp_is_that_of_the_formula_whatever_is_dropped(kind, D, dropout):
    case = Case(**{"B": 2, "H": 4, "H_kv": 2, "T": 333, "S": 512, "D": D} | kind)
    q, k, v, _ = case.tensors(torch.bfloat16, "cuda")
    options: Any = {"score": case.score, "layout": case.layout("cuda"), "sinks": case.sink_logits("cuda")}
    lse = flash(dropout)(q, k, v, **options, dropout_key=KEY, return_lse=True).lse
    assert_log_sum_exp(lse, q, k, case)


@pytest.mark.parametrize("offset", [-300.0, 300.0])
@pytest.mark.parametrize("D", [64, 256])
def test_the_log_sum_exp_may_be_far_from_zero(D, offset):
    case = Case(1, 2, 2, 200, 200, D)
    q, k, v, _ = case.tensors(torch.bfloat16, "cuda")
    q[..., 0], k[..., 0] = offset / 10, 10 * D**0.5  # adds offset to every score
    assert_log_sum_exp(flash()(q, k, v, return_lse=True).lse, q, k, case)


@DROPOUT
@pytest.mark.parametrize("q_start", [None, 70], ids=["at_the_end", "elsewhere"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_rows_without_keys_have_the_sink_alone(D, q_start, dropout):
    """Queries before the first key, more than a tile has; also through positions that the caller gives."""
    case = Case(2, 4, 2, 300, 150, D, sinks=True, dropout=dropout)
    before = case.T - case.S
    layout = Layout() if q_start is None else Layout(q_start=q_start, k_start=q_start + before)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionOutput:
        return flash(dropout)(q, k, v, **options | {"layout": layout})

    assert_accurate(attend, case, torch.bfloat16, "cuda", factor=3.0)
    q, k, v, do = case.tensors(torch.bfloat16, "cuda")
    sinks = case.sink_logits("cuda")
    assert sinks is not None
    run = partial(attend, score=case.score, dropout_key=KEY)
    lse = run(q, k, v, sinks=sinks, return_lse=True).lse
    assert lse is not None
    assert_log_sum_exp(lse, q, k, case)
    torch.testing.assert_close(lse[:, :, :before], sinks[:, None].expand(2, 4, before))
    got = gradients(partial(run, sinks=sinks), q, k, v, do)
    assert not got["out"][:, :, :before].any()
    assert not got["dq"][:, :, :before].any()


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    ("score", "layout", "S"),
    [
        (Score(sinks=True), Layout(), 0),
        (Score(causal=False, sinks=True), Layout(), 0),
        (Score(window=33, sinks=True), Layout(q_start=900), 200),
        (Score(sinks=True), Layout(q_start=0, k_start=900), 200),
    ],
    ids=["no_keys", "no_keys_full", "behind_the_window", "before_the_keys"],
)
def test_where_no_row_sees_a_key_the_sink_is_all_there_is(score, layout, S, D):
    case = Case(2, 4, 2, 130, S, D, sinks=True)
    (q, k, v, do), sinks = case.tensors(torch.bfloat16, "cuda"), case.sink_logits("cuda")
    assert sinks is not None

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, return_lse: bool = False) -> AttentionOutput:
        return flash()(q, k, v, score=score, layout=layout, sinks=sinks, return_lse=return_lse)

    lse = attend(q, k, v, sinks, return_lse=True).lse
    assert lse is not None
    torch.testing.assert_close(lse, sinks[:, None].expand(2, 4, 130))
    assert not any(x.any() for x in gradients(attend, q, k, v, do, sinks=sinks).values())
