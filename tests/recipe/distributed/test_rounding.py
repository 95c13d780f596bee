"""A model that computes with rounded copies of its matrices has the losses and gradients of autocast, bit for bit."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention import DropoutKey
from model.further import further
from model.gpt import GPT, Computation
from model.options import GPTConfig, Recompute
from model.score import ScoreConfig
from recipe.distributed.sharing import gathered, rounded, rounded_by_autocast, with_others, without_values
from tests.parts import PARTS, built

T, VOCAB = 32, 61
FORGETTING = ScoreConfig(formula="s + c[h, i] - c[h, j]", tensors={"c": "model.forget_gate"})


def build(config: GPTConfig, score: ScoreConfig | None = None, computation: Computation | None = None) -> GPT:
    """Biases and scales too are values that rounding would change."""
    config = replace(config, dropout=0.1)
    return built(config, T, VOCAB, dropout=0.1, spread=0.02, computation=computation, score=score)


def loss(model: GPT, dtype: torch.dtype) -> Tensor:
    tokens = torch.randint(VOCAB, (3, T), generator=torch.Generator().manual_seed(6))
    targets = tokens.roll(-1, dims=1)
    after = None if model.further is None else further(tokens, targets)
    with torch.autocast("cpu", dtype):
        return model.objective(model(tokens, targets, dropout_key=DropoutKey(1, 2, 0, first_sequence=0), further=after))


@pytest.mark.parametrize(
    ("recompute", "dtype"), [(Recompute.none, torch.bfloat16), (Recompute.block, torch.float16)], ids=["none", "block"]
)
@pytest.mark.parametrize("name", ["gpt2", *PARTS, "forgetting"])
def test_copies_have_the_losses_and_gradients_of_autocast(name, recompute, dtype):
    config = PARTS.get(name, GPTConfig(n_layers=2, n_heads=2, n_embd=32, bias=True))
    computation = Computation(recompute, dtype=dtype)
    whole = build(config, FORGETTING if name == "forgetting" else None, computation)
    copies = {p: rounded(p, dtype) for p in rounded_by_autocast(whole)}
    computed = loss(with_others(whole, copies), dtype)
    computed.backward()
    found = [copies.get(p, p).grad for p in whole.parameters()]
    whole.zero_grad()
    expected = loss(whole, dtype)
    expected.backward()
    assert torch.equal(computed, expected)
    for (parameter, p), gradient in zip(whole.named_parameters(), found, strict=True):
        assert p.grad is not None, parameter
        assert gradient is not None, parameter
        assert gradient.dtype is (dtype if p in copies else torch.float32)
        assert torch.equal(gradient.float(), p.grad), parameter


def test_everything_but_the_matrices_of_linear_layers_is_shared():
    whole = build(PARTS["everything"], FORGETTING)
    computing = with_others(whole, {p: rounded(p, torch.bfloat16) for p in rounded_by_autocast(whole)})
    assert computing.attend is whole.attend
    linear = ("c_attn.weight", "c_proj.weight", "c_fc.weight", "c_gate.weight")
    for (name, p), (_, q) in zip(whole.named_parameters(), computing.named_parameters(), strict=True):
        assert (q is not p) == (name.startswith("h.") and name.endswith(linear)), name
    assert all(b is c for b, c in zip(whole.buffers(), computing.buffers(), strict=True))


def test_copies_of_a_model_have_its_attention_itself():
    """It may hold what no copy can have."""
    whole = build(GPTConfig(n_layers=1, n_heads=2, n_embd=32))
    whole.attend.held = threading.Lock()  # type: ignore[attr-defined]
    empty = without_values(whole)
    assert empty.attend is whole.attend
    assert gathered(whole, empty).attend is whole.attend
