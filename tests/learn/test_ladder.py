"""learn/: every step of the ladder computes attention, and its checks can fail."""

import math

import pytest
import torch

from learn import ladder, softmax
from learn.ladder import EXAMPLE, LADDER, Rung, measure, overflow, run, silent_error, without


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.function.__name__)
def test_every_step_gives_the_texts_number_and_torchs(rung):
    out = run(rung.function, EXAMPLE, EXAMPLE[:, None])
    assert f"{out.item():.4f}" == "5.4329"
    x, v = torch.randn(33, dtype=torch.float64), torch.randn(33, 5, dtype=torch.float64)
    assert torch.allclose(run(rung.function, x, v), torch.softmax(x, 0) @ v, rtol=1e-12, atol=1e-12)


def test_each_step_reads_the_scores_as_often_as_expected():
    assert [step.passes for step in measure()] == [2, 3, 2, 2, 1, 1, 1, 1]


def test_the_formula_overflows_where_the_precision_ends_and_the_others_never():
    assert overflow(softmax.native, torch.float16) == pytest.approx(math.log(65504), abs=0.01)
    assert overflow(softmax.native, torch.float32) == pytest.approx(math.log(torch.finfo(torch.float32).max), abs=0.01)
    assert all(math.isinf(overflow(rung.function, torch.float16)) for rung in LADDER[1:])


def test_without_the_rescaling_the_output_is_another_finite_number():
    line, wrong, right = silent_error()
    assert "alpha" in line
    assert math.isfinite(wrong)
    assert abs(wrong - right) > 1
    with pytest.raises(ValueError, match="no line"):
        without(softmax.native, ladder.RESCALING)


def test_a_step_that_computes_something_else_is_caught():
    wrong = Rung(without(softmax.one_pass_attention, ladder.RESCALING), "wrong", "", "")
    with pytest.raises(AssertionError, match="wrong is off by"):
        measure([*LADDER[:4], wrong])
