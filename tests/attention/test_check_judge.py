"""The judge of `gpt-attention check`: its formula, the rounding that it expects, and its verdicts row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention import AttentionConfig
from attention.check.cases import Case, draw, problem
from attention.check.formula import evaluate, expected_rounding
from attention.check.judge import judge
from attention.check.results import results, verdicts
from tests.attention import reference
from tests.attention.subjects import CASES, subject_of
from tests.right_attention import RIGHT

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_formula_and_its_gradients_are_those_of_autograd_on_an_independent_one(case: Case):
    case = replace(case, dtype="fp64")
    theirs = reference.Case(
        *(case.B, case.H, case.H_kv, case.T, case.S, case.D, case.causal),
        window=case.window,
        soft_cap=case.soft_cap,
        alibi=case.alibi,
        sinks=case.sinks,
        documents=case.documents,
    )
    inputs = draw(case)
    if case.alibi:  # for two heads the checker's slopes are the published ones
        assert inputs.slopes is not None
        assert inputs.slopes.tolist() == reference.published_slopes(case.H)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
    sinks = None if inputs.sinks is None else inputs.sinks.double()
    exact = evaluate(*tensors, problem(case, inputs)).results
    expected = reference.gradients(lambda *x: reference.formula(*x, case=theirs), *tensors, sinks=sinks)
    for name, x in expected.items():
        torch.testing.assert_close(exact[name], x)
    log_sum_exp = reference.log_sum_exp(*tensors[:2], theirs, inputs.sinks)
    torch.testing.assert_close(exact["lse"], log_sum_exp.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_formulas_errors_are_about_those_that_are_expected(case: Case, dtype: str):
    case = replace(case, dtype=dtype)
    inputs = draw(case)
    tensors, asked = (inputs.q, inputs.k, inputs.v, inputs.do), problem(case, inputs)
    q, k, v, do = (x.double() for x in tensors)
    exact, rounded = evaluate(q, k, v, do, asked), evaluate(*tensors, asked)
    expected = expected_rounding(q, k, v, do, asked, exact, inputs.q.dtype)
    for name in ("out", "dq", "dk", "dv"):
        error = (rounded.results[name].double() - exact.results[name]).square().mean(dim=-1).sqrt()
        ratio = error.square().mean().sqrt() / expected[name].square().mean().sqrt()
        # Sums of fp32 are given more than one rounding.
        assert (0.01 if dtype == "fp32" else 0.15) < ratio < 1.5, name


@pytest.mark.parametrize("name", ["out", "dk", "lse", "dsinks"])
def test_a_single_wrong_row_counts_however_small_its_numbers_are(name: str):
    case = replace(CASES["changed"], size=1e-3, dtype="bf16")
    inputs = draw(case)
    got = results(subject_of(AttentionConfig("tiled")), case, inputs)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.do)
    assert all(verdict.passes for verdict in judge(*tensors, problem(case, inputs), got))
    x = got[name]
    assert x is not None
    row = (1,) if name == "dsinks" else (0, 1, 20)
    x[row] *= 1.2
    (found,) = [verdict for verdict in judge(*tensors, problem(case, inputs), got) if not verdict.passes]
    assert (found.name, found.row) == (name, row)


def test_a_missing_result_one_of_another_shape_and_nan_fail():
    inputs = draw(case := Case())
    got = results(subject_of(AttentionConfig("naive")), case, inputs)
    out = got["out"]
    assert out is not None
    nan = out.clone()
    nan[0, 1, 5, 3] = torch.nan
    for wrong in (None, out[:, :1], nan):
        found = judge(inputs.q, inputs.k, inputs.v, inputs.do, problem(case, inputs), got | {"out": wrong})
        assert found[0].share == torch.inf
        assert all(verdict.passes for verdict in found[1:])


@pytest.mark.parametrize("name", RIGHT)
def test_correct_attention_is_not_accused(name: str):
    subject = subject_of(RIGHT[name])
    for seed, case in enumerate(CASES.values()):
        for dtype in ("fp32", "bf16", "fp16"):
            if subject.supports(case):
                for found in verdicts(subject, replace(case, dtype=dtype, seed=seed), torch.device("cpu")):
                    assert found.passes, (case, found)
