"""nanoGPT's ckpt.pt: its model and weights, read without running what a pickle may hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.mistakes import model_mistakes
from model.options import Activation, GPTConfig
from model.score import ScoreConfig
from recipe.infer.huggingface.families import FAMILIES
from recipe.infer.huggingface.settings import Settings, WeightsError, number

CHECKPOINT = "ckpt.pt"
SIZES = {"n_layers": "n_layer", "n_heads": "n_head", "n_embd": "n_embd", "vocab_size": "vocab_size"}
WAY_OUT = "load it in the library that wrote it, and name the folder that transformers' save_pretrained writes."


def read_checkpoint(path: Path, source: str) -> dict[str, Any]:
    """The content of a checkpoint of nanoGPT: tensors and numbers, memory-mapped. Raises WeightsError for another."""
    if re.fullmatch(r"model_\d+\.pt", path.name):
        raise WeightsError(
            f"init_from={source} is a checkpoint of nanochat, which is not read; train model=nanochat, or name a "
            f"folder of a model of type {', '.join(FAMILIES)}."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, torch and zipfile raise many types
        raise WeightsError(f"init_from={source}: {path} holds more than tensors or is damaged; {WAY_OUT}") from error
    parts = [content.get(name) for name in ("model", "model_args")] if isinstance(content, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise WeightsError(f"init_from={source}: {path} is no checkpoint of nanoGPT; {WAY_OUT}")
    return content


def nanogpt_settings(path: Path, source: str) -> Settings:
    """The settings of nanoGPT's model: GPT-2's, but for the exact GELU, matrices as torch stores them, and optional
    biases. Raises WeightsError."""
    options = read_checkpoint(path, source)["model_args"]
    values: dict[str, Any] = {name: number(options, key, None, source) for name, key in SIZES.items()}
    model = GPTConfig(name="nanogpt", mlp=Activation.gelu_exact, bias=bool(options.get("bias")), **values)
    for flaw in model_mistakes(model):
        raise WeightsError(f"init_from={source} describes no model: {flaw}")
    family = replace(FAMILIES["gpt2"], transposed=False, zeros=None, parts={})
    return Settings(family, model, ScoreConfig(), number(options, "block_size", None, source))
