"""A model of this recipe in the architecture of transformers that computes exactly the same: its config.json and its
weights under that architecture's names.

An architecture matches if writing the model's config.json for it and reading this again gives the same model
(settings.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.errors import Option
from model.gpt import GPT
from model.options import GPTConfig, ModelError
from model.score import layer_scores
from recipe.files import plain
from recipe.infer.huggingface.families import FAMILIES, Family
from recipe.infer.huggingface.settings import WeightsError, essence, read_settings, write_settings
from recipe.wording import as_typed

REMEDY = "describe a changed model in recipe/infer/huggingface/families.py, or export one that is not."


class Described(NamedTuple):
    """A model in an architecture of transformers.

    config   the content of config.json
    tensors  the content of model.safetensors
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def describe(model: GPT, attention_dropout: float) -> Described:
    """The model in the architecture that matches it.

    attention_dropout  of its training, for further training

    Raises WeightsError, which names the options that no architecture has.
    """
    if model.config.mixers:
        raise WeightsError("No architecture of transformers has this model's model.layers.")
    differing = {kind: differences(model, family) for kind, family in FAMILIES.items()}
    family = next((FAMILIES[kind] for kind in FAMILIES if not differing[kind]), None)
    if family is None:
        nearest = min(FAMILIES, key=lambda kind: len(differing[kind]))
        named = " and ".join(f"{name}={as_typed(plain(value))}" for name, value in differing[nearest].items())
        raise WeightsError(
            f"No architecture of transformers has this model's {named}. The nearest, without them, is {nearest}; "
            "docs/models.md lists what each has."
        )
    content = write_settings(family, model)
    content |= dropouts(family, model.config, attention_dropout) | {"initializer_range": 0.02}
    return Described(content, renamed(model, family))


def differences(model: GPT, family: Family) -> dict[str, Any]:
    """The model's options that change when it is written to a family's config.json and read back."""
    ours = essence(model.config, model.scores, model.vocab_size)
    content = write_settings(family, model)
    try:
        settings = read_settings(content, "export")
    except ModelError:  # the family's config.json does not describe a valid model
        return ours
    theirs = essence(settings.model, layer_scores(settings.score, model.config.n_layers), content["vocab_size"])
    if family.zeros is not None and not model.config.bias:
        theirs["bias"] = False
    differing = {name: value for name, value in ours.items() if name not in theirs or theirs[name] != value}
    scores = differing.pop("score", None)
    if differing.pop("qk_eps", None) and "qk_norm" not in differing:
        differing["norm_eps"] = None  # its default differs between queries and keys, and the stream
    named = {f"model.{name}": shown(model.config, name, value) for name, value in differing.items()}
    return named | (of_scores(model, layer_scores(settings.score, model.config.n_layers)) if scores else {})


def shown(config: GPTConfig, name: str, value: Any) -> Any:
    """The value of an option, in the form in which the user gave it."""
    return config.rope_scaling.kind if name == "rope_scaling" else getattr(config, name, value)


def of_scores(model: GPT, theirs: tuple[Any, ...]) -> dict[str, Any]:
    """The options of score.* that a family does not have, by the names that the user writes."""
    if len(set(model.scores)) > 1:
        return {"score.layers": "layers that differ"}
    (ours,) = set(model.scores)
    asked = ours.features()
    if ours.formula is not None:  # also one that only scales, which every implementation has
        asked |= {"formula": Option("score.formula", ours.formula)}
    return {option.name: option.value for name, option in asked.items() if name not in theirs[0].features()}


def dropouts(family: Family, config: GPTConfig, attention_dropout: float) -> dict[str, float]:
    """The rates of dropout, for further training, as far as the architecture has keys for them."""
    if family.kind == "gpt2":
        return {"embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": attention_dropout}
    both = {"embedding_dropout": config.dropout, "residual_dropout": config.dropout}
    return {"attention_dropout": attention_dropout} | (both if family.kind == "starcoder2" else {})


def renamed(model: GPT, family: Family) -> dict[str, Tensor]:
    """The weights under the family's names. Raises WeightsError for one that it has no name for."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("further."):  # the second head, which only training uses
            continue
        try:
            names = family.stored(name)
        except KeyError as error:
            raise WeightsError(f"{family.architecture} has no weights such as this model's {name}; {REMEDY}") from error
        value = parameter[: model.vocab_size] if name in ("wte.weight", "lm_head.weight") else parameter
        if family.transposed and value.ndim == 2 and name.startswith("h."):
            value = value.T
        config = model.config
        sizes = [n * config.head_size for n in (config.n_heads, config.kv_heads, config.kv_heads)]
        for stored_name, part in zip(names, value.split(sizes) if len(names) > 1 else [value], strict=True):
            tensors[stored_name] = stored(part)
            bias = stored_name.removesuffix("weight") + "bias"
            if family.zeros and not model.config.bias and family.zeros.search(bias) and not name.startswith("w"):
                tensors[bias] = torch.zeros(len(parameter))
    return tensors


def stored(x: Tensor) -> Tensor:
    """A copy on the CPU that shares no memory with another, which safetensors would refuse."""
    return x.detach().cpu().clone(memory_format=torch.contiguous_format)
