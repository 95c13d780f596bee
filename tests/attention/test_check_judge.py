"""The judge of `gpt-attention check`: its formula, the rounding that it expects, and its verdicts row by row."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention import AttentionConfig
from attention.check.calls import problem_of
from attention.check.cases import Case, draw, problem
from attention.check.formula import evaluate, expected_rounding
from attention.check.judge import judge
from attention.check.results import results
from tests.attention import formulas
from tests.attention.reference import KEY, published_slopes
from tests.attention.subjects import CASES, subject_of
from tests.right_attention import plain

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("keep", [False, True], ids=["exact", "dropout"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_formula_and_its_gradients_are_those_of_torchs_softmax_and_autograd(case, keep):
    """In fp64."""
    inputs = draw(replace(case, dtype="fp64"))
    mask = torch.rand(case.B, case.H, case.T, case.S) < 0.7 if keep else torch.ones(())
    asked = problem(replace(case, dropout=0.3 * keep), inputs, mask if keep else None)
    exact = evaluate(inputs.q, inputs.k, inputs.v, inputs.do, asked)
    q, k, v = leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    sinks = None if inputs.sinks is None else inputs.sinks.double().requires_grad_()
    options: dict[str, Any] = {"window": case.window, "softcap": case.soft_cap, "s_aux": sinks}
    options |= {"alibi_slopes": torch.tensor(published_slopes(case.H)).double()} if case.alibi else {}
    unit = torch.eye(case.S).double().expand(case.B, case.H_kv, -1, -1)  # the output is the weights
    weights, lse = plain(q, k, unit, case.causal, **options, documents=inputs.starts, return_lse=True)
    out = (weights * mask / (0.7 if keep else 1)) @ v.repeat_interleave(case.H // case.H_kv, dim=1)
    gradients = torch.autograd.grad(out, [*leaves, *([] if sinks is None else [sinks])], inputs.do)
    for name, x in zip(("lse", "out", "dq", "dk", "dv", "dsinks"), (lse, out, *gradients), strict=False):
        torch.testing.assert_close(exact.results[name], x)


@pytest.mark.parametrize("text", [x for x in formulas.FORMULAS if not x.startswith("where(")])
def test_scores_by_formula_and_their_gradients_are_pythons_and_autograds(text):
    """Python evaluates the text in fp64, and autograd goes back through it; here also with its keys reversed."""
    rng = random.Random(text)
    for kind in ("documents", rng.choice(formulas.KINDS)):
        drawn = formulas.draw(rng, text, kind, longest=33)
        q, k, v, do = (x.double() for x in (drawn.q, drawn.k, drawn.v, drawn.do))
        tensors = drawn.tensors | ({} if drawn.sinks is None else {"sinks": drawn.sinks})
        call: dict[str, Any] = {"score": drawn.score, "layout": drawn.layout}
        call |= {"dropout_key": KEY, "dropout": drawn.dropout}
        asked = problem_of(q, k, **call, tensors=tensors)(slice(0, q.shape[1]))
        torch.set_default_dtype(torch.float64)  # of a number times a position
        expected = drawn.results(torch.float64, torch.float64)
        torch.set_default_dtype(torch.float32)
        backwards = evaluate(q, k.flip(2), v.flip(2), do, asked.keys_reversed()).results
        backwards |= {name: backwards[name].flip(2) for name in ("dk", "dv")}
        for name, x in expected.items():
            name = f"d({name[1:]})" if name[1:] in drawn.tensors else name
            for found in (evaluate(q, k, v, do, asked).results, backwards):
                torch.testing.assert_close(found[name], torch.atleast_1d(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_formulas_errors_are_about_those_that_are_expected(case, dtype):
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
def test_a_single_wrong_row_counts_however_small_its_numbers_are(name):
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
