"""Models whose scores are formulas with learned tensors."""

from __future__ import annotations

import pytest
import torch

from attention import AttentionConfig, ScoreError, build_attention
from model.gpt import GPT
from model.options import GPTConfig
from model.score import ScoreConfig

SMALL = GPTConfig(n_layers=1, n_heads=2, n_embd=16)


def build(score: ScoreConfig, name: str = "tiled") -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL, 100, 16, build_attention(AttentionConfig(name)), score=score)


def tokens() -> torch.Tensor:
    return torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))


def test_learned_tensors_and_gates_receive_gradients():
    bias = ScoreConfig(formula="s + bias[h, min(i - j, 7)]", learned={"bias": {"shape": ["h", 8], "init": 0.5}})
    gates = ScoreConfig(formula="s + c[h, i] - c[h, j]", tensors={"c": "model.forget_gate"})
    for score in (bias, gates):
        model = build(score)
        model(tokens(), tokens()).backward()
        added = {name: x for name, x in model.named_parameters() if "formula" in name}
        assert added
        assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in added.values())
    assert list(added) == ["h.0.attn.formula.made.c.linear.weight", "h.0.attn.formula.made.c.linear.bias"]


def test_alibi_by_formula_is_alibi():
    by_name = build(ScoreConfig(alibi=True))
    by_formula = build(ScoreConfig(formula="s - m[h] * (i - j)", tensors={"m": "alibi_slopes"}))
    torch.testing.assert_close(by_formula(tokens()), by_name(tokens()))


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
        (ScoreConfig(formula="s + b2[h]", learned={"b2": ["t"]}), r"score.learned.b2=.* must be a shape"),
        (ScoreConfig(formula="s + x[h]", tensors={"x": "model.forget_gate"}), r"write x\[h, i\] and x\[h, j\]"),
        (
            ScoreConfig(formula="s + x[h]", tensors={"x": "text"}),
            r"must be model.forget_gate, alibi_slopes, or numbers",
        ),
    ],
)
def test_tensors_that_nothing_gives_are_refused_when_the_model_is_built(score, complaint):
    with pytest.raises(ScoreError, match=complaint):
        build(score)
