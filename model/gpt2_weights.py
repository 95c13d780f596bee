"""Reads GPT-2's weights in Hugging Face's naming; recipe/huggingface/ writes them.

The names are the model's own with the prefix `transformer.`. Hugging Face stores the matrices of linear layers
transposed (its Conv1D computes x W + b), does not pad the vocabulary, and always has biases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from attention import Score
from data.untrusted import SETTINGS, UntrustedError, read_json
from model.config import GPTConfig, ModelError, Positions
from model.gpt import GPT

PREFIX = "transformer."
WEIGHTS = "model.safetensors"
TRANSPOSED = re.compile(r"(c_attn|c_proj|c_fc)\.weight$")
# The causal mask, which old files carry as a buffer, and the head, which is the tied embedding.
NOT_WEIGHTS = re.compile(r"(\.attn\.(masked_)?bias|^lm_head\.weight)$")

# Options of a GPT-2 configuration for which this model supports one value only.
FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
    "add_cross_attention": (False,),
}


# Options in which models differ that are GPT-2 otherwise.
FREE = {"name", "n_layers", "n_heads", "n_kv_heads", "n_embd", "dropout", "bias", "positions", "vocab_size"}


class WeightsError(ModelError):
    """Weights that this model cannot load or export; the message says why."""


def load_gpt2(model: GPT, source: str, download: Callable[..., str] = snapshot_download) -> None:
    """Overwrite the model's parameters with those of GPT-2.

    source    a folder with config.json and model.safetensors, or a model's name on the Hugging Face hub
    download  brings a model's files from the hub to a folder

    Positions beyond the model's seq_len are left out; a model without biases takes weights whose biases are all zero.
    Raises WeightsError where the source cannot be read or describes another model.
    """
    folder = find(source, download)
    config = read_config(folder, source)
    if flaws := list(unlike(model.config, model.scores, model.seq_len, model.vocab_size, config, source)):
        raise WeightsError("\n".join(flaws))
    tensors = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in read_tensors(folder, source).items()
        if not NOT_WEIGHTS.search(name.removeprefix(PREFIX))
    }
    if not model.config.bias:
        biases = {name for name in tensors if name.endswith(".bias")}
        if any(tensors.pop(name).any() for name in biases):
            raise WeightsError(f"init_from={source} has biases and the model has none; set model.bias=true.")

    parameters = dict(model.named_parameters())
    if tensors.keys() != parameters.keys():
        missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
        raise WeightsError(f"init_from={source} lacks the weights {missing[:3]} or has unknown ones {unknown[:3]}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = tensors[name].T if TRANSPOSED.search(name) else tensors[name]
            if name == "wpe.weight":
                tensor = tensor[: model.seq_len]
            used = parameter[: model.vocab_size] if name == "wte.weight" else parameter
            if used.shape != tensor.shape:
                raise WeightsError(
                    f"{name} of init_from={source} has the shape {tuple(tensor.shape)} where its config.json promises "
                    f"{tuple(used.shape)}."
                )
            used.copy_(tensor)


def parts_unlike_gpt2(config: GPTConfig) -> Iterator[str]:
    """The options of a model that chose a part which GPT-2's block does not have."""
    default = GPTConfig()
    for field in fields(config):
        if field.name not in FREE and getattr(config, field.name) != getattr(default, field.name):
            yield f"model.{field.name}"


def find(source: str, download: Callable[..., str]) -> Path:
    """The folder `source`, or the folder to which `download` brought its files from the hub."""
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(download(source, allow_patterns=["config.json", WEIGHTS]))
    except (OSError, ValueError) as error:  # the hub's errors all derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"init_from={source} is not a folder here, and the Hugging Face hub did not provide a model of this name "
            f"({reason.rstrip('.')}); give a folder with config.json and {WEIGHTS}, or a name such as gpt2."
        ) from error


def read_config(folder: Path, source: str) -> dict[str, Any]:
    """config.json, with GPT-2's defaults for what it leaves out."""
    try:
        content = read_json(folder / "config.json", SETTINGS)
    except OSError as error:
        reason = str(error.strerror)
    except UntrustedError as error:
        reason = f"it {error}"
    else:
        if isinstance(content, dict):
            return content
        reason = "it is not a mapping"
    raise WeightsError(f"init_from={source} needs a readable config.json of GPT-2 in {folder} ({reason}).")


def read_tensors(folder: Path, source: str) -> dict[str, Tensor]:
    """Every tensor of model.safetensors."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise WeightsError(no_weights(folder, source))
    try:
        return load_file(path)
    except Exception as error:  # safetensors raises its own type for a damaged file
        raise WeightsError(f"init_from={source}: {path} cannot be read ({error}); copy or fetch it again.") from error


def no_weights(folder: Path, source: str) -> str:
    """The sentence for a folder without model.safetensors."""
    found = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".safetensors", ".pt")))
    return (
        f"init_from={source} needs one {WEIGHTS} in {folder}, which has {found or 'no weights'}; sharded or "
        "pickled weights can be rewritten with transformers' save_pretrained(folder, max_shard_size='100GB')."
    )


def as_typed(value: object) -> object:
    """A value as an override has it: true and false for what Python calls True and False."""
    return str(value).lower() if isinstance(value, bool) else value


def unlike(
    ours: GPTConfig, scores: Sequence[Score], seq_len: int, vocab_size: int | None, config: dict[str, Any], source: str
) -> Iterator[str]:
    """A sentence for each way in which a model is not the GPT-2 that config.json describes.

    vocab_size  None: not known yet
    """
    if (kind := config.get("model_type", "gpt2")) not in FIXED["model_type"]:
        yield f"init_from={source} is a model of type {kind}, and only the weights of GPT-2 can be loaded; name those."
        return
    for part in parts_unlike_gpt2(replace(ours, qk_norm=False)):
        yield f"init_from={source} is a GPT-2, and {part} is of another model; leave it out."
    for key, accepted in FIXED.items():
        if (value := config.get(key, accepted[0])) not in accepted:
            yield f"init_from={source} has {key}={value}; this model computes {key}={accepted[0]}."
    n_embd, n_positions = config.get("n_embd", 768), config.get("n_positions", 1024)
    if (n_inner := config.get("n_inner") or 4 * n_embd) != 4 * n_embd:
        yield f"init_from={source} has n_inner={n_inner}; this model's is 4 n_embd = {4 * n_embd}."
    for name, mine, theirs in (
        ("model.n_layers", ours.n_layers, config.get("n_layer", 12)),
        ("model.n_heads", ours.n_heads, config.get("n_head", 12)),
        ("model.n_kv_heads", ours.n_kv_heads or config.get("n_head", 12), config.get("n_head", 12)),
        ("model.n_embd", ours.n_embd, n_embd),
        ("model.positions", ours.positions.value, Positions.learned.value),
        ("model.qk_norm", ours.qk_norm, False),
        ("score.sinks", any(score.sinks for score in scores), False),
    ):
        if mine != theirs:
            need = f"{name}={as_typed(theirs)}"
            yield f"init_from={source} has {need}, and the model {as_typed(mine)}; set {need}."
    if vocab_size not in (None, theirs := config.get("vocab_size", 50257)):
        yield (
            f"init_from={source} has a vocabulary of {theirs} tokens, and the data's tokenizer {vocab_size}; "
            "GPT-2's own is data.tokenizer=gpt2."
        )
    if seq_len > n_positions:
        yield f"init_from={source} has {n_positions} positions, fewer than seq_len={seq_len}; lower it."


def has_biases(path: Path) -> bool:
    """Whether a file of weights has a bias that is not zero; reads the biases alone."""
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(".bias") and not NOT_WEIGHTS.search(name)]  # noqa: SIM118
        return any(bool(file.get_tensor(name).any()) for name in names)


def folder_mistakes(
    source: str, ours: GPTConfig, scores: Sequence[Score], seq_len: int, vocab_size: int | None
) -> Iterator[str]:
    """A sentence for each reason why a model cannot start from the weights in a folder, before any are loaded."""
    folder = Path(source)
    if not folder.is_dir():
        if folder.is_file():
            yield f"init_from={source} is a file; name the folder that holds it and config.json."
        elif folder.is_absolute() or source.startswith("."):
            yield f"init_from={source} is no folder; name one with config.json and {WEIGHTS}, or a model such as gpt2."
        return
    if (folder / ".hydra").is_dir():
        yield (
            f"init_from={source} is a run folder; continue it with resume={source}, or export its model with: "
            f"python sample.py run={source} export=<folder>"
        )
        return
    try:
        yield from unlike(ours, scores, seq_len, vocab_size, read_config(folder, source), source)
    except WeightsError as error:
        yield str(error)
    path = folder / WEIGHTS
    if not path.is_file():
        yield no_weights(folder, source)
        return
    try:
        biased = not ours.bias and has_biases(path)
    except Exception as error:  # safetensors raises its own type for a damaged file
        yield f"init_from={source}: {path} cannot be read ({error}); copy or fetch it again."
        return
    if biased:
        yield f"init_from={source} has biases and the model has none; set model.bias=true."
