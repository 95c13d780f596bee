"""The probe: its measurements, that it changes nothing, and that it detects exactly the wrong implementations."""

import math
from collections.abc import Iterator

import pytest
import torch

import attention
from attention import (
    AttentionConfig,
    AttentionShape,
    DropoutKey,
    DropoutRng,
    build_attention,
)
from attention.naive import NaiveAttention
from data.batches import Batch
from model.gpt import GPT, Computation
from model.options import GPTConfig, Recompute
from recipe.errors import UserError
from recipe.training import parity_probe as parity
from recipe.training.parity import beyond_rounding, summarise
from recipe.training.parity_probe import ParityConfig, ParityProbe, check_parity, fwd_bwd
from tests.attention.faults import registered
from tests.wrong_attention import WRONG

VOCABULARY, T, B = 65, 32, 4


class TooLarge(NaiveAttention):
    """Runs out of memory for more than one sequence of 16 tokens."""

    name = "too_large"

    def attend(self, q, k, v, call):
        if q.shape[0] * q.shape[2] > 16:
            raise torch.OutOfMemoryError("a test's")
        return super().attend(q, k, v, call)


@pytest.fixture(autouse=True)
def known():
    with registered():
        attention.IMPLEMENTATIONS[TooLarge.name] = TooLarge
        yield


def small_gpt(config: AttentionConfig, seed: int = 0, **kwargs) -> GPT:
    torch.manual_seed(seed)
    size = GPTConfig(n_layers=2, n_heads=2, n_embd=32, dropout=0.1)
    return GPT(size, VOCABULARY, T, build_attention(config), **kwargs)


def shape_in(dtype: torch.dtype) -> AttentionShape:
    return AttentionShape(head_dim=16, n_heads=2, n_kv_heads=2, dtype=dtype, device=torch.device("cpu"))


def probe_for(config: AttentionConfig, dtype: torch.dtype = torch.float32, reference: str = "naive") -> ParityProbe:
    return ParityProbe(ParityConfig(every=1, reference=reference), config, shape_in(dtype))


def batches(seed: int, count: int) -> Iterator[tuple[Batch, DropoutKey]]:
    """A learnable text: a token is followed by two or three times its number."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(count):
        tokens = torch.randint(1, VOCABULARY, (B, T + 1), generator=generator)
        for t in range(T):
            tokens[:, t + 1] = tokens[:, t] * torch.randint(2, 4, (B,), generator=generator) % VOCABULARY
        yield Batch(tokens[:, :-1], tokens[:, 1:]), DropoutKey(seed=seed, step=step, layer=0, first_sequence=0)


def train(model: GPT, seed: int, steps: int) -> None:
    """A training loop in five lines."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch, key in batches(seed, steps):
        optimizer.zero_grad()
        model(batch.inputs, batch.targets, dropout_key=key).backward()
        optimizer.step()


def test_the_probe_leaves_weights_gradients_generators_and_modes_as_they_were():
    config = AttentionConfig(dropout=0.1)
    model = small_gpt(config)
    batch, key = next(batches(1, 1))
    model(batch.inputs, batch.targets, dropout_key=key).backward()
    gradients = [p.grad for p in model.parameters()]
    values = torch.nn.utils.parameters_to_vector([g for g in gradients if g is not None])
    before, state = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    try:
        probe_for(config).measure(model, batch, key)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.nn.utils.parameters_to_vector([g for g in gradients if g is not None]), values)


def test_the_same_attention_with_the_same_masks_differs_by_nothing():
    config = AttentionConfig(dropout=0.2)
    measured = probe_for(config).measure(small_gpt(config), *next(batches(1, 1)))
    assert measured["parity/loss_diff"] == measured["parity/logits_max_diff"] == measured["parity/grad_rel_err"] == 0
    assert 0 < measured["parity/noise_grad_rel_err"] < 1e-5
    assert 0 < measured["parity/noise_logits_max_diff"] < 1e-5
    assert measured["parity/tokens"] == [4, 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.attention, Recompute.block])
def test_a_pass_gives_the_loss_and_gradients_of_training(recompute, dtype):
    """The independent reference is backward() on a model whose weights have that precision."""
    config = AttentionConfig(dropout=0.1)
    batch, key = next(batches(3, 1))
    model = small_gpt(config, computation=Computation(recompute))
    measured = fwd_bwd(model, batch, key, model.attend, dtype)
    model = small_gpt(config).to(dtype)
    model(batch.inputs, batch.targets, dropout_key=key).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(measured.gradients[name], p.grad, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def trained():
    model = small_gpt(AttentionConfig(dropout=0.1))
    train(model, seed=1, steps=40)
    return model


@pytest.mark.parametrize(
    ("name", "dtype"),
    # While scores are small the missing rescaling matters little: less than bf16's rounding.
    [(name, torch.float32) for name in WRONG] + [(name, torch.bfloat16) for name in WRONG if name != "no_rescaling"],
)
def test_a_wrong_implementation_is_beyond_rounding(trained, name, dtype):
    trained.attend = build_attention(WRONG[name])
    found = beyond_rounding(probe_for(WRONG[name], dtype).measure(trained, *next(batches(2, 1))))
    assert found is not None
    assert "differs from the reference's" in found


def test_a_correct_implementation_is_within_rounding():
    config = AttentionConfig(name="keys_backwards")
    for seed in range(3):
        model = small_gpt(config, seed)
        train(model, seed, steps=2)
        measured = probe_for(config).measure(model, *next(batches(seed, 1)))
        assert measured["parity/grad_rel_err"] > 0  # another order of sums is another rounding
        assert beyond_rounding(measured) is None
    assert beyond_rounding(measured | {"parity/grad_rel_err": math.nan}) is not None


def test_a_reference_that_runs_out_of_memory_gets_fewer_tokens_with_a_note(caplog):
    probe = probe_for(AttentionConfig(), reference="too_large")
    model, micro_batch = small_gpt(AttentionConfig()), next(batches(1, 1))
    assert probe.measure(model, *micro_batch)["parity/tokens"] == [1, 16]
    assert "comparing 1 of 16" in caplog.text
    caplog.clear()
    assert probe.measure(model, *micro_batch)["parity/tokens"] == [1, 16]
    assert not caplog.text  # it has remembered the size that fits


def test_scores_that_will_not_fit_the_free_memory_are_not_tried(monkeypatch):
    config = AttentionConfig()
    model, probe = small_gpt(config), probe_for(config)
    # Two sequences: 3 matrices x 2 layers x 2 heads of 32 x 32 fp64 scores, and 4 x 65 logits per token.
    two_sequences = 8 * (3 * 2 * 2 * 2 * T * T + 4 * 2 * T * VOCABULARY)
    monkeypatch.setattr(parity, "free_memory", lambda device: 1.01 * two_sequences / parity.MEMORY_SHARE)
    assert probe.measure(model, *next(batches(1, 1)))["parity/tokens"] == [2, 32]


def test_masks_that_cannot_be_replayed_are_refused():
    with pytest.raises(UserError, match=r"attention\.rng=replay"):
        check_parity(ParityConfig(every=1), AttentionConfig("sdpa", 0.1, DropoutRng.torch), shape_in(torch.float32))


def test_summary_is_the_worst_of_every_check():
    def line(step, grad, parameter):
        return {
            "step": step,
            **dict.fromkeys(("parity/loss_diff", "parity/logits_max_diff"), 1.0 * step),
            **dict.fromkeys(("parity/noise_loss_diff", "parity/noise_logits_max_diff"), 0.5 * step),
            "parity/grad_rel_err": grad,
            "parity/noise_grad_rel_err": 0.5,
            "parity/worst_parameter": parameter,
            "parity/tokens": [4, 32],
        }

    summary = summarise([line(1, 0.2, "wte"), {"step": 2, "train/loss": 3.0}, line(3, 0.1, "wpe")])
    assert summary == {
        "checks": 2,
        "worst_loss_diff": 3.0,
        "worst_logits_max_diff": 3.0,
        "worst_grad_rel_err": 0.2,
        "worst_parameter": "wte",
        "noise_loss_diff": 1.5,
        "noise_logits_max_diff": 1.5,
        "noise_grad_rel_err": 0.5,
        "tokens": [4, 32],
    }
    assert summarise([{"step": 2, "train/loss": 3.0}]) is None
    broken = summarise([line(1, 0.2, "wte"), line(2, 0.3, "wpe") | {"parity/grad_rel_err": "nan"}])
    assert broken is not None
    assert (broken["worst_grad_rel_err"], broken["worst_parameter"]) == ("nan", "wpe")
