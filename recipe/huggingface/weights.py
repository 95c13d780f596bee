"""The architectures of transformers that compute exactly what a model of this recipe does, and its weights as theirs.

GPT-2       learned positions, as many key/value heads as query heads, causal attention
Starcoder2  rotary positions, grouped heads and one sliding window for all layers, if any; else GPT-2's layer norms,
            tanh GELU and tied embedding (Lozhkov et al. 2024, "StarCoder 2 and The Stack v2")

Both always have biases in their norms, and GPT-2 in its linear layers too: a model without gets biases of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.config import Positions
from model.gpt import GPT
from model.gpt2_weights import FIXED, PREFIX, TRANSPOSED, WeightsError, parts_unlike_gpt2
from recipe.errors import as_override

REMEDY = "describe a changed model in recipe/huggingface/weights.py, or export one that is not."


class Described(NamedTuple):
    """A model in an architecture of transformers.

    config   the content of config.json
    tensors  the content of model.safetensors
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def describe(model: GPT, attention_dropout: float) -> Described:
    """The model in the architecture that matches it.

    attention_dropout  of its training, for those who train on

    Raises WeightsError, with what the model has that no architecture matches.
    """
    if obstacles := [*unmatched(model)]:
        raise WeightsError(
            f"No architecture of transformers has what this model has: {' and '.join(obstacles)}. GPT-2 has learned "
            "positions and plain causal attention, Starcoder2 rotary positions, grouped heads and one window for all "
            "layers; train such a model to export it."
        )
    matching = starcoder2 if model.config.positions is Positions.rotary else gpt2
    return matching(model, attention_dropout)


def unmatched(model: GPT) -> Iterator[str]:
    """The options that neither architecture has, as the user writes them."""
    config, scores = model.config, list(dict.fromkeys(model.scores))
    yield from (part for part in parts_unlike_gpt2(config) if part != "model.rope_base")
    if config.positions is Positions.none:
        yield "model.positions=none"
    if len(scores) > 1:
        yield "score.layers with layers that differ"
    features = {name: asked for score in scores for name, asked in score.features().items()}
    grouped = (config.n_kv_heads or config.n_heads) != config.n_heads
    rotary = config.positions is Positions.rotary
    for feature, asked in features.items():
        if feature == "window" and rotary:
            continue
        yield as_override(asked) + (" with learned positions" if feature == "window" else "")
    if grouped and not rotary:
        yield f"model.n_kv_heads={config.n_kv_heads} with learned positions"


def gpt2(model: GPT, attention_dropout: float) -> Described:
    """The model as a GPT2LMHeadModel, which stores the matrices of linear layers transposed."""
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = unpadded(model, name, parameter)
        tensors[PREFIX + name] = stored(value.T if TRANSPOSED.search(name) else value)
        if not config.bias and name not in ("wte.weight", "wpe.weight"):
            tensors[PREFIX + name.removesuffix("weight") + "bias"] = torch.zeros(len(parameter))
    described = {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in FIXED.items()},
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_len,
        "n_embd": config.n_embd,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": attention_dropout,
        "initializer_range": 0.02,
    }
    return Described(described, tensors)


def starcoder2(model: GPT, attention_dropout: float) -> Described:
    """The model as a Starcoder2ForCausalLM, which projects to queries, keys and values by a matrix each."""
    config = model.config
    n_kv_heads = config.n_kv_heads or config.n_heads
    head_dim = config.n_embd // config.n_heads
    (score,) = set(model.scores)
    renamed = {
        "wte": "model.embed_tokens",
        "ln_f": "model.norm",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.c_fc",
        "mlp.c_proj": "mlp.c_proj",
    }
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        layer = ""
        if module.startswith("h."):
            _, number, module = module.split(".", maxsplit=2)
            layer = f"model.layers.{number}."
        if module == "attn.c_attn":
            sizes = [config.n_embd, n_kv_heads * head_dim, n_kv_heads * head_dim]
            for projection, part in zip("qkv", parameter.split(sizes), strict=True):
                tensors[f"{layer}self_attn.{projection}_proj.{kind}"] = stored(part)
            continue
        if module not in renamed:
            raise WeightsError(f"Starcoder2 has no weights such as this model's {name}; {REMEDY}")
        tensors[f"{layer}{renamed[module]}.{kind}"] = stored(unpadded(model, name, parameter))
        if not config.bias and "ln_" in module:
            tensors[f"{layer}{renamed[module]}.bias"] = torch.zeros(len(parameter))
    described = {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.seq_len,
        "hidden_size": config.n_embd,
        "intermediate_size": 4 * config.n_embd,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": n_kv_heads,
        "sliding_window": score.window,
        "rope_theta": config.rope_base,  # for transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": config.bias,
        "tie_word_embeddings": True,
        "embedding_dropout": config.dropout,
        "residual_dropout": config.dropout,
        "attention_dropout": attention_dropout,
        "initializer_range": 0.02,
    }
    return Described(described, tensors)


def unpadded(model: GPT, name: str, parameter: Tensor) -> Tensor:
    """The parameter without the rows that pad the vocabulary."""
    return parameter[: model.vocab_size] if name == "wte.weight" else parameter


def stored(x: Tensor) -> Tensor:
    """A copy on the CPU that shares no memory with another, which safetensors would refuse."""
    return x.detach().cpu().clone(memory_format=torch.contiguous_format)
