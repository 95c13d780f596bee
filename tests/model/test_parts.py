"""Every part of the model against the textbook, transformers' frequencies, torch's counts, and its compiled version."""

import random
from dataclasses import fields, replace
from enum import Enum
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from attention.dropout import DropoutKey
from model.counting import flops_per_token
from model.further import further
from model.gpt import GPT, Computation
from model.loss import LossKind
from model.options import (
    AttentionBias,
    GPTConfig,
    ModelError,
    Norm,
    NormScale,
    Positions,
    Recompute,
    RopeScaling,
    Scaling,
)
from recipe.training.optimizer import hidden_matrices
from tests.model.textbook import Textbook
from tests.parts import EVERYTHING, GEMMA, LLAMA, PARTS, SMALL, built, window

VOCAB, T = 50, 12
KEY = DropoutKey(torch.tensor(1), torch.tensor(2), 0, torch.tensor(3))


build = partial(built, seq_len=T, vocab_size=VOCAB, spread=0.2)
tokens = partial(window, T=T, vocab_size=VOCAB)


def random_config(seed: int) -> GPTConfig:
    """A value for each option, drawn independently but for what cannot be combined."""
    draw, hints = random.Random(seed), get_type_hints(GPTConfig)
    chosen: dict[str, Any] = {"n_layers": 2, "n_embd": 16, "n_heads": 4}
    for field in fields(GPTConfig):
        kind = hints[field.name]
        if kind is bool:
            chosen[field.name] = draw.random() < 0.5
        elif isinstance(kind, type) and issubclass(kind, Enum):
            chosen[field.name] = draw.choice(list(kind))
    del chosen["mixer"]  # has no effect where all layers are attention
    few = {"n_kv_heads": (None, 1, 2), "head_dim": (None, 6), "scale_dim": (None, 3), "logit_cap": (None, 2.0)}
    few |= {"value_embeddings": (0, 1), "mlp_width": (None, 20), "norm_eps": (None, 1e-3), "mtp": (0.0, 0.5)}
    chosen |= {name: draw.choice(values) for name, values in few.items()}
    if chosen["positions"] is Positions.rotary:
        chosen["rope_fraction"] = draw.choice((1.0, 0.7))
        chosen["rope_layers"] = draw.choice((None, [False, True]))
        kinds = [RopeScaling(), RopeScaling(Scaling.linear, 2.0), RopeScaling(Scaling.llama3, 8.0, original=30)]
        chosen["rope_scaling"] = draw.choice([*kinds, RopeScaling(Scaling.yarn, 4.0, original=40, fast=6.0)])
    if chosen["norm"] is Norm.layer and chosen["norm_scale"] is NormScale.plus_one:
        chosen["norm_scale"] = NormScale.learned
    if chosen["bias"]:
        chosen["attention_bias"] = AttentionBias.none
    return GPTConfig(**chosen | ({} if chosen["qk_norm"] else {"qk_norm_over": GPTConfig.qk_norm_over}))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_choice_of_parts_is_the_textbooks_model(seed):
    config = random_config(seed)
    model = build(config).double()
    book = Textbook(config, model.state_dict(), VOCAB)
    inputs, targets = tokens()
    expected = torch.stack([book.logits(row) for row in inputs])
    assert_close(model(inputs), expected, rtol=1e-5, atol=1e-5)
    losses = model(inputs, targets, further=further(inputs, targets)).double()
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten())
    if not config.mtp:
        return assert_close(losses, loss, rtol=1e-5, atol=1e-5)
    logits = torch.cat([book.further_logits(row) for row in inputs])
    second = F.cross_entropy(logits, targets[:, 1:].flatten())
    assert_close(losses, torch.stack([loss, second]), rtol=1e-5, atol=1e-5)
    assert_close(model.objective(losses), loss + config.mtp * second, rtol=1e-5, atol=1e-5)


def gradients(model: GPT, run: Any, key: DropoutKey) -> list[Any]:
    """The losses of `run`, which is the model or compiled from it, and the gradients of all parameters."""
    model.zero_grad()
    inputs, targets = tokens()
    losses = run(inputs, targets, dropout_key=key, further=further(inputs, targets))
    model.objective(losses).backward()
    return [losses.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
def test_compiled_into_one_graph_a_step_is_the_same():
    torch._dynamo.reset()
    computation = Computation(Recompute.around_attention, LossKind.chunked)
    model = build(replace(EVERYTHING, dropout=0.1), name="sdpa", computation=computation)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for key in (KEY, replace(KEY, step=torch.tensor(3), first_sequence=torch.tensor(7))):
            assert_close(gradients(model, step, key), gradients(model, model, key))


HYBRID = GPTConfig(n_layers=2, n_heads=4, n_embd=32, positions=Positions.rotary, layers=["gdn", "attention"])


@pytest.mark.parametrize("config", [*PARTS.values(), HYBRID], ids=[*PARTS, "mixers"])
def test_recomputation_changes_no_bit(config):
    results = []
    for recompute in (Recompute.none, Recompute.attention, Recompute.block):
        model = build(replace(config, dropout=0.1), dropout=0.1, computation=Computation(recompute))
        results.append(gradients(model, model, KEY))
    for other in results[1:]:
        assert all(a is not None and torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("half", "in_fp32"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("config", PARTS.values(), ids=PARTS)
def test_the_residual_stream_has_the_precision_that_was_asked_for(config, half, in_fp32):
    model = build(config, computation=Computation(residual_in_fp32=in_fp32))
    seen: list[torch.dtype] = []
    for block in model.h:
        block.register_forward_hook(lambda module, inputs, output: seen.extend([inputs[0].dtype, output[0].dtype]))
    inputs, targets = tokens()
    with torch.autocast("cpu", half):
        loss = model(inputs, targets)
    assert seen == [torch.float32 if in_fp32 else half] * 2 * config.n_layers
    assert_close(loss, model(inputs, targets), rtol=0.03, atol=0)
    assert seen[-1] == torch.float32  # which without autocast it always has


@pytest.mark.parametrize("config", PARTS.values(), ids=PARTS)
def test_flops_per_token_are_those_that_torch_counts(config):
    model = build(config, vocab_size=64, computation=Computation(loss=LossKind.plain))
    inputs, targets = tokens(3, vocab_size=64)
    with FlopCounterMode(display=False) as counter:
        model.objective(model(inputs, targets, further=further(inputs, targets))).backward()
    assert counter.get_total_flops() == inputs.numel() * flops_per_token(model, T, causal=False)


@pytest.mark.parametrize("loss", [LossKind.plain, LossKind.chunked])
@pytest.mark.parametrize("tied", [False, True])
def test_padding_rows_stay_zero_in_embedding_and_head(tied, loss):
    model = built(replace(EVERYTHING, tied=tied), T, VOCAB, computation=Computation(loss=loss))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    inputs, targets = tokens()
    for _ in range(2):
        optimizer.zero_grad()
        model.objective(model(inputs, targets, further=further(inputs, targets))).backward()
        optimizer.step()
    assert model.wte.weight.shape == model.head.shape == (64, 24)
    assert not model.wte.weight[VOCAB:].any()
    assert not model.head[VOCAB:].any()
    assert model(inputs).shape == (2, T, VOCAB)


def test_muon_takes_the_matrices_of_blocks_and_leaves_head_and_embeddings_to_adamw():
    model = build(EVERYTHING)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden = {names[id(matrix)]: rows for matrix, rows in hidden_matrices(model)}
    blocks = [f"h.{layer}" for layer in range(2)] + ["further.block"]
    kinds = ("attn.c_attn", "attn.c_gate", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert set(hidden) == {f"{block}.{kind}.weight" for block in blocks for kind in kinds} | {"further.c_join.weight"}
    assert all(hidden[f"{block}.attn.c_attn.weight"] == [32, 16, 16] for block in blocks)


def test_the_second_head_learns_nothing_from_the_end_of_a_row():
    inputs, targets = tokens()
    after = further(inputs, targets)
    assert torch.equal(after.tokens[:, :-1], inputs[:, 1:])
    assert torch.equal(after.targets[:, :-1], targets[:, 1:])
    assert (after.targets[:, -1] == -100).all()
    assert after.known == inputs.numel() - len(inputs)
    part = after.rows(((0, 4), (8, 12)))
    assert part.tokens.shape == (2, 8)
    assert part.known == pytest.approx(after.known.item() * 8 / 12)


def test_a_vocabulary_may_be_larger_than_the_tokenizers():
    model = build(replace(GEMMA, vocab_size=70))
    assert model.vocab_size == 70
    assert model(tokens()[0]).shape == (2, T, 70)
    with pytest.raises(ModelError, match=r"model.vocab_size=40 is fewer than the tokenizer's 50 tokens"):
        build(replace(GEMMA, vocab_size=40))


ROTARY = GPTConfig(n_layers=4, n_heads=4, n_embd=32, positions=Positions.rotary)


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (SMALL, {"n_embd": 30}, r"model.n_embd=30 is not a multiple of model.n_heads=4; choose .* among 1, 2, 3"),
        (SMALL, {"n_kv_heads": 3}, r"model.n_heads=4 is not a multiple of model.n_kv_heads=3; .* among 1, 2, 4\."),
        (SMALL, {"n_kv_heads": 0}, r"model.n_kv_heads=0"),
        (SMALL, {"n_layers": 0}, r"model.n_layers=0 must be at least 1"),
        (SMALL, {"dropout": 1.0}, r"model.dropout=1.0 must be 0 or between 1/256 and 255/256"),
        (SMALL, {"dropout": 0.001}, r"model.dropout=0.001 must be 0 or between"),
        (SMALL, {"n_embd": 36, "positions": Positions.rotary}, r"heads of 9 channels .* use model.positions=learned"),
        (LLAMA, {"mlp_width": 0}, r"model.mlp_width=0 must be at least 1\."),
        (LLAMA, {"head_dim": 7}, r"heads of 7 channels \(model.head_dim=7\) are odd"),
        (LLAMA, {"logit_cap": -1.0}, r"model.logit_cap=-1.0 must be above 0, or null\."),
        (LLAMA, {"norm": Norm.layer, "norm_scale": NormScale.plus_one}, r"set model.norm=rms, or leave it out"),
        (LLAMA, {"value_embeddings": 2}, r"between 0 and half of model.n_layers=2"),
        (LLAMA, {"value_residual": True, "n_layers": 1}, r"needs at least two layers"),
        (LLAMA, {"mtp": -0.1}, r"model.mtp=-0.1 must not be negative"),
        (EVERYTHING, {"qk_norm": False}, r"model.qk_norm_over=width has no effect without norms; set model.qk_norm=t"),
        (EVERYTHING, {"bias": True}, r"model.attention_bias=all has no effect with model.bias=true"),
        (EVERYTHING, {"rope_fraction": 0.3}, None),
        (EVERYTHING, {"rope_fraction": 0.4}, r"0.4 of heads of 8 channels are no even number; use another"),
        (EVERYTHING, {"rope_fraction": 1.5}, r"model.rope_fraction=1.5 must be above 0 and at most 1"),
        (EVERYTHING, {"rope_layers": [True, False, True]}, r"has 3 entries, which do not divide model.n_layers=2"),
        (EVERYTHING, {"rope_layers": [False]}, r"leaves no layer with positions; use model.positions=none"),
        (EVERYTHING, {"positions": Positions.none}, r"model.rope_fraction has no effect with model.positions=none"),
        (ROTARY, {"rope_base": 0.5}, r"model.rope_base=0.5 must be above 1"),
        (ROTARY, {"rope_scaling": RopeScaling(factor=4.0)}, r"has values and no kind; set model.rope_scaling.kind"),
        (ROTARY, {"rope_scaling": RopeScaling(Scaling.linear, 0.5)}, r"factor=0.5 must be at least 1"),
        (ROTARY, {"rope_scaling": RopeScaling(Scaling.linear, 2.0, original=8)}, r"original=8 has no effect with"),
        (ROTARY, {"rope_scaling": RopeScaling(Scaling.yarn, 2.0)}, r"kind=yarn needs model.rope_scaling.original"),
        (
            ROTARY,
            {"rope_scaling": RopeScaling(Scaling.yarn, 2.0, original=9, fast=1.0, slow=2.0)},
            r"fast=1.0 must be above model.rope_scaling.slow=2.0",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_in_one_sentence(config, change, sentence):
    if sentence is None:
        build(replace(config, **change))
    else:
        with pytest.raises(ModelError, match=sentence):
            build(replace(config, **change))
