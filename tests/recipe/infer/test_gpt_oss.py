"""A model can have gpt-oss's attention: grouped heads of 64, biases, sinks, windows in every other layer and YaRN."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.layout import Layout
from model.attention import SelfAttention, Surroundings
from model.blocks import Block
from model.gpt import GPT
from model.options import AttentionBias, GPTConfig, Norm, Positions, RopeScaling, Scaling
from model.score import ScoreConfig
from tests import parts

transformers = pytest.importorskip("transformers")

T, WINDOW, LAYERS = 160, 128, 2
# gpt-oss-20b's attention in a narrower model with fewer heads.
THEIRS = {
    "hidden_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64,
    "sliding_window": WINDOW, "vocab_size": 64, "intermediate_size": 32, "num_local_experts": 2,
    "num_experts_per_tok": 1, "max_position_embeddings": 131_072,
}  # fmt: skip
OURS = GPTConfig(
    n_layers=LAYERS,
    n_embd=48,
    n_heads=16,
    n_kv_heads=2,
    head_dim=64,
    norm=Norm.rms,
    attention_bias=AttentionBias.all,
    positions=Positions.rotary,
    rope_base=150_000.0,
    rope_scaling=RopeScaling(Scaling.yarn, 32.0, original=4096, truncate=False),
)
SCORE = ScoreConfig("gpt_oss", WINDOW, sinks=True, layers=[{}, {"window": None}])


def their_attentions() -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """The attention of each layer of a random gpt-oss, its input and its output in fp64."""
    torch.manual_seed(1)
    config = transformers.GptOssConfig(**THEIRS)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    attentions = [layer.self_attn for layer in model.model.layers]
    calls: list[dict[str, Any]] = []
    for attention in attentions:
        torch.nn.init.normal_(attention.sinks)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            torch.nn.init.normal_(projection.weight, std=0.3)
            torch.nn.init.normal_(projection.bias)
        attention.register_forward_pre_hook(lambda _, args, given: calls.append(given), with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(64, (2, T)), use_cache=False)
        inputs, outputs = [given["hidden_states"].double() for given in calls], []
        for attention, given, x in zip(attentions, [*calls], inputs, strict=True):
            places = tuple(table.double() for table in given["position_embeddings"])
            given = {**given, "hidden_states": x, "position_embeddings": places}
            outputs.append(attention.double()(**given)[0])
    return attentions, inputs, outputs


def built(name: str, score: ScoreConfig) -> GPT:
    return parts.built(OURS, T, 64, name, score=score).double().eval()


def attention_of(model: GPT, layer: int) -> SelfAttention:
    block = model.h[layer]
    assert isinstance(block, Block)
    assert isinstance(block.attn, SelfAttention)
    return block.attn


@torch.no_grad()
def attended(model: GPT, layer: int, x: Tensor) -> Tensor:
    """The output of a layer's attention for x (B, T, C)."""
    around = Surroundings(model.tables.at(((0, T),)), Layout(), model.attend)
    out, _ = attention_of(model, layer)(x, around)
    return out


@torch.no_grad()
def take(ours: SelfAttention, theirs: Any) -> None:
    """Copy the weights of their attention."""
    projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    ours.c_attn.weight.copy_(torch.cat([p.weight for p in projections]))
    ours.c_attn.bias.copy_(torch.cat([p.bias for p in projections]))
    ours.c_proj.load_state_dict(theirs.o_proj.state_dict())
    ours.get_parameter("sinks").copy_(theirs.sinks)


def test_each_layers_attention_equals_that_of_transformers_and_needs_the_window_and_the_sinks():
    attentions, inputs, outputs = their_attentions()
    for name in ("naive", "tiled"):
        model = built(name, SCORE)
        for layer, (theirs, x, expected) in enumerate(zip(attentions, inputs, outputs, strict=True)):
            take(attention_of(model, layer), theirs)
            # Both have angles in fp32.
            torch.testing.assert_close(attended(model, layer, x), expected, rtol=1e-5, atol=1e-5)
    weights = attention_of(model, 0).state_dict()
    for score in (ScoreConfig(sinks=True), ScoreConfig("gpt_oss", WINDOW)):
        without = built("naive", score)
        attention_of(without, 0).load_state_dict(weights, strict=False)
        assert (attended(without, 0, inputs[0]) - outputs[0]).abs().max() > 1e-2
