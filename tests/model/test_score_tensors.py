"""Models whose scores are formulas with learned tensors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from attention import AttentionConfig, Score, ScoreError, build_attention
from model import score_tensors
from model.options import GPTConfig
from model.score import ScoreConfig
from model.score_tensors import ForgetGate, ScoreTensors
from tests.parts import built, window

build = partial(built, GPTConfig(n_layers=1, n_heads=2, n_embd=16), name="tiled")
TOKENS, _ = window()


GATES = "s + c[h, i] - c[h, j]"
GATED = ScoreConfig(formula=GATES, tensors={"c": "model.forget_gate"})


def test_learned_tensors_and_gates_receive_gradients():
    bias = ScoreConfig(formula="s + bias[h, min(i - j, 7)]", learned={"bias": {"shape": ["h", 8], "init": 0.5}})
    for score in (bias, GATED):
        model = build(score=score)
        model(TOKENS, TOKENS).backward()
        added = {name: x for name, x in model.named_parameters() if "formula" in name}
        assert added
        assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in added.values())
    assert list(added) == ["h.0.attn.formula.made.c.linear.weight", "h.0.attn.formula.made.c.linear.bias"]


def gates(formula: str = GATES) -> ScoreTensors:
    torch.manual_seed(0)
    return ScoreTensors(Score(formula=formula), {}, {"c": score_tensors.FORGET_GATE}, channels=4, n_heads=2)


def attended(q: Tensor, k: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """Causal attention with the gates' sums c (B, H, T), by definition."""
    s = (q @ k.mT) / q.shape[-1] ** 0.5 + c[..., :, None] - c[..., None, :]
    return s.masked_fill(~torch.ones_like(s).tril().bool(), -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("name", ["naive", "tiled"])
def test_after_a_million_tokens_gates_are_right_to_a_hundred_thousandth(name):
    """The last 40 of 2^20 tokens: each sum is about -700,000, where numbers of fp32 are 0.06 apart."""
    module, x = gates(), torch.randn(1, 2**20, 4)
    gate = module.made["c"]
    assert isinstance(gate, ForgetGate)
    linear = gate.linear.double()
    c = F.logsigmoid(linear(x.double())).cumsum(1).mT[..., -40:].detach().requires_grad_()
    linear.float()
    score, tensors = module(x)
    low, steps = (tensors[name][..., -40:].detach().requires_grad_() for name in ("c", "c_in_steps"))
    assert c.min() < -600_000
    gaps = steps[..., 1:] - steps[..., :-1] + (low[..., 1:] - low[..., :-1])
    assert_close(gaps, c[..., 1:] - c[..., :-1], rtol=0, atol=2e-6, check_dtype=False)

    q, k, v, do = torch.randn(4, 1, 2, 40, 8)
    out = build_attention(AttentionConfig(name))(q, k, v, score=score, tensors={"c": low, "c_in_steps": steps}).out
    exact = attended(q.double(), k.double(), v.double(), c)
    assert_close(out, exact, rtol=0, atol=1e-5, check_dtype=False)
    (found,), (expected,) = (torch.autograd.grad(*x) for x in ((out, low, do), (exact, c, do.double())))
    assert_close(found, expected, rtol=0, atol=5e-5, check_dtype=False)


def test_a_model_computes_with_sums_in_parts_from_some_length_on(monkeypatch):
    model = build(score=GATED)
    model(TOKENS, TOKENS).backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss = model(TOKENS, TOKENS).item()
    monkeypatch.setattr(score_tensors, "LONGEST_SUM", 15)
    model.zero_grad()
    in_parts = model(TOKENS, TOKENS)
    in_parts.backward()
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert in_parts.item() == pytest.approx(loss, abs=1e-6)
    assert_close(after, before, rtol=1e-4, atol=1e-6)
    assert not torch.equal(after[-1], before[-1])  # rounded elsewhere: it did take another way


@pytest.mark.parametrize("formula", ["s + 2 * (c[h, i] - c[h, j])", "s + c[h, i] - c[h, j] + sin(c[h, j])"])
def test_other_formulas_of_a_sum_read_it_whole(formula):
    score, named = gates(formula)(torch.randn(1, 1100, 4))
    assert (score.formula, set(named)) == (formula, {"c"})


def test_alibi_by_formula_is_alibi():
    by_name = build(score=ScoreConfig(alibi=True))
    by_formula = build(score=ScoreConfig(formula="s - m[h] * (i - j)", tensors={"m": "alibi_slopes"}))
    assert_close(by_formula(TOKENS), by_name(TOKENS))


@pytest.mark.parametrize(
    ("score", "complaint"),
    [
        (ScoreConfig(formula="s + bias[h, min(i - j, 7)]"), r"reads bias .* nothing gives; .*bias=\[h,128\]"),
        (
            ScoreConfig(formula="s + bias[h]"),
            r"reads bias \(head\), which nothing gives; .*score.learned.bias=\[h\] or",
        ),
        (
            ScoreConfig(formula="s + bais[h]", learned={"bias": ["h"]}),
            r"score.learned has bias, which no formula reads; nothing gives bais",
        ),
        (ScoreConfig(formula="2 * s", learned={"bias": [3]}), r"score.learned has bias, which no formula reads"),
        (ScoreConfig(formula="s + b2[h]", learned={"b2": ["t"]}), r"score.learned.b2=\[t\] must be a shape"),
        (ScoreConfig(formula="s + c[h, j]", learned={"c": ["n_heads", 128]}), r"c=\[n_heads,128\] must be a shape"),
        (ScoreConfig(formula="s + x[h]", tensors={"x": "model.forget_gate"}), r"write x\[h, i\] and x\[h, j\]"),
        (
            ScoreConfig(formula="s + x[h]", tensors={"x": "text"}),
            r"must be model.forget_gate, alibi_slopes, or numbers",
        ),
    ],
)
def test_tensors_that_nothing_gives_are_refused_when_the_model_is_built(score, complaint):
    with pytest.raises(ScoreError, match=complaint):
        build(score=score)
