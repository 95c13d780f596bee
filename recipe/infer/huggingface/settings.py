"""config.json of transformers as options of a model, and back, by the tables of families.py; and nanoGPT's ckpt.pt,
read without running what a pickle may hold."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attention.score import Score
from model.gpt import GPT
from model.mistakes import model_mistakes
from model.norms import EPS, QK_EPS
from model.options import Activation, AttentionBias, GPTConfig, ModelError, Positions, RopeScaling, Scaling
from model.positions import FAST, SLOW
from model.score import ScoreConfig
from recipe.infer.huggingface.families import FAMILIES, Family
from recipe.wording import listed

SLIDING, FULL = "sliding_attention", "full_attention"
# Options of a scaling and their keys; without a key for the original length, another key gives it.
SCALING = {
    Scaling.linear: {"factor": "factor"},
    Scaling.llama3: {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "fast": "high_freq_factor",
        "slow": "low_freq_factor",
    },
    Scaling.yarn: {
        "factor": "factor",
        "original": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}
CHECKPOINTS = ("ckpt.pt", "model_[0-9]*.pt")  # of nanoGPT, and of nanochat
NANOGPT_SIZES = {"n_layers": "n_layer", "n_heads": "n_head", "n_embd": "n_embd", "vocab_size": "vocab_size"}
WAY_OUT = "load it in the library that wrote it, and name the folder that transformers' save_pretrained writes."


class WeightsError(ModelError):
    """Weights that this model cannot load or export; the message says why."""


class Settings(NamedTuple):
    """The settings of a model in config.json.

    longest  the longest input that it was trained for
    """

    family: Family
    model: GPTConfig
    score: ScoreConfig
    longest: int


def read_settings(content: dict[str, Any], source: str) -> Settings:
    """The options of the model that config.json describes. Raises WeightsError for settings that no model here has."""
    kind = content.get("model_type", "gpt2")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    experts = next((f" with experts ({key}={content[key]})" for key in content if key.endswith("_experts")), "")
    if family is None:
        raise WeightsError(
            f"init_from={source} is a model of type {kind}{experts}, which no model here computes; "
            f"name one of type {', '.join(FAMILIES)}."
        )
    for key in ("quantization_config", "adapter_config"):
        if content.get(key):
            raise WeightsError(f"init_from={source} has a {key}; name a folder with plain weights.")
    for key, accepted in family.fixed.items():
        if (value := content.get(key, accepted[0])) not in accepted:
            raise WeightsError(f"init_from={source} has {key}={value}; a model here computes {key}={accepted[0]}.")
    values: dict[str, Any] = {option: content.get(key, family.defaults.get(key)) for option, key in family.keys.items()}
    for option in ("n_layers", "n_heads", "n_embd", "vocab_size", *(["mlp_width"] if kind != "gpt2" else [])):
        values[option] = number(content, family.keys[option], source, values[option])
    values["norm_eps"] = number(content, family.keys["norm_eps"], source, values["norm_eps"], float)
    key = longest_key(family)
    longest = number(content, key, source, family.defaults.get(key))
    values["tied"] = bool(values.get("tied", GPTConfig.tied))
    values |= family.parts | biases(family, content, source)
    if values.get("positions") is Positions.rotary:
        values |= rotary(content, longest, source)
    model = GPTConfig(name=Path(source).name or kind, **values)
    for flaw in model_mistakes(model):
        raise WeightsError(f"init_from={source} describes no model: {flaw}")
    return Settings(family, model, score(family, content, model.n_layers, source), longest)


def longest_key(family: Family) -> str:
    """The key of the longest input."""
    return "n_positions" if family.kind == "gpt2" else "max_position_embeddings"


def number(content: dict[str, Any], key: str, source: str, default: Any = None, kind: type[float] = int) -> Any:
    """A number above 0 of config.json, whole or of another kind. Raises WeightsError."""
    value = content.get(key, default)
    if not isinstance(value, int | kind) or isinstance(value, bool) or value <= 0:
        needed = "whole number" if kind is int else "number above 0"
        raise WeightsError(f"init_from={source} has {key}={value} in config.json, where a {needed} has to be.")
    return kind(value)


def biases(family: Family, content: dict[str, Any], source: str) -> dict[str, Any]:
    """The options of biases, where a family's models differ in them."""
    flags = {key: bool(content.get(key, family.defaults.get(key))) for key in family.biases}
    if "use_bias" in flags:
        return {"bias": flags["use_bias"]}
    attention, mlp = flags.get("attention_bias", False), flags.get("mlp_bias", False)
    if mlp and not attention:
        raise WeightsError(f"init_from={source} has mlp_bias=true and attention_bias=false, which no model here has.")
    return {"bias": True} if mlp else {"attention_bias": AttentionBias.all} if attention else {}


def rotary(content: dict[str, Any], longest: int, source: str) -> dict[str, Any]:
    """The options of rotary positions; transformers 5 has them all under rope_parameters."""
    rope = (content.get("rope_scaling") or {}) | (content.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    kinds = {scaling.value: scaling for scaling in SCALING} | {"default": Scaling.none}
    strange = [key for key in ("mscale", "mscale_all_dim") if rope.get(key)]
    if kind not in kinds or strange:
        raise WeightsError(
            f"init_from={source} has rope_type={kind}{''.join(f' with {key}' for key in strange)}; a model here has "
            f"{', '.join(kinds)}."
        )
    keys = SCALING.get(kinds[kind], {})
    scaling = {option: rope[key] for option, key in keys.items() if rope.get(key) is not None}
    if "original" in keys:
        scaling.setdefault("original", longest)
    if kinds[kind] is Scaling.yarn and "factor" in rope:
        scaling.setdefault("factor", longest / scaling["original"])  # as transformers takes null
    required = ["factor", *(["slow", "fast"] if kinds[kind] is Scaling.llama3 else [])]  # by transformers
    if keys and (absent := [keys[option] for option in required if option not in scaling]):
        raise WeightsError(
            f"init_from={source} has rope_type={kind} without {listed(absent)}; write it into config.json."
        )
    return {
        "rope_base": number(content | rope, "rope_theta", source, 10_000.0, float),
        "rope_fraction": number(content | rope, "partial_rotary_factor", source, 1.0, float),
        "rope_scaling": RopeScaling(kinds[kind], **scaling),
    }


def score(family: Family, content: dict[str, Any], n_layers: int, source: str) -> ScoreConfig:
    """The scores of the layers: windows and a cap."""
    window, cap = (content.get(key, family.defaults.get(key)) for key in ("sliding_window", "attn_logit_softcapping"))
    sliding = [False] * n_layers
    if family.windows == "all":
        sliding = [window is not None] * n_layers
    elif family.windows == "types" and (family.kind == "gemma2" or content.get("use_sliding_window")):
        first = content.get("max_window_layers", 28)
        by_default = [i % 2 == 0 if family.kind == "gemma2" else i >= first for i in range(n_layers)]
        types = content.get("layer_types") or [SLIDING if slides else FULL for slides in by_default]
        if len(types) != n_layers or not set(types) <= {SLIDING, FULL}:
            raise WeightsError(
                f"init_from={source} has layer_types of {len(types)} layers; a model here has {n_layers} of "
                f"{SLIDING} or {FULL}."
            )
        sliding = [kind == SLIDING and window is not None for kind in types]
    cap = cap if family.kind == "gemma2" else None
    period = next(p for p in range(1, n_layers + 1) if n_layers % p == 0 and sliding == sliding[:p] * (n_layers // p))
    layers = [{} if slides else {"window": None} for slides in sliding[:period]] if period > 1 else None
    used = window if any(sliding) else None
    return ScoreConfig("causal" if used is None and cap is None else family.kind, used, cap, layers=layers)


def write_settings(family: Family, network: GPT) -> dict[str, Any]:
    """config.json of a model in a family, as far as the family has keys for its options."""
    model, scores = network.config, network.scores
    values = essence(model, scores, network.vocab_size)
    content: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.kind,
        longest_key(family): network.seq_len,
    }
    content |= {key: accepted[0] for key, accepted in family.fixed.items()}
    content |= {key: values[option] for option, key in family.keys.items()}
    content |= dict.fromkeys(family.biases, model.bias)
    if "attention_bias" in content and model.attention_bias is AttentionBias.all:
        content["attention_bias"] = True
    if model.positions is Positions.rotary:
        scaling = values["rope_scaling"]
        keys = SCALING.get(scaling.kind, {})
        rope = {key: value for option, key in keys.items() if (value := getattr(scaling, option)) is not None}
        rope |= {"rope_type": scaling.kind.value if keys else "default", "rope_theta": model.rope_base}
        content |= {"rope_theta": model.rope_base, "rope_parameters": rope}  # the former for transformers 4
        if values["rope_fraction"] != values["head_dim"]:
            content["partial_rotary_factor"] = rope["partial_rotary_factor"] = model.rope_fraction
    windows = [score.window for score in scores]
    window = next(filter(None, windows), None)
    if family.windows == "all":
        content["sliding_window"] = window
    elif family.windows == "types":
        # Gemma 2's code needs a number even where no layer uses it.
        content["sliding_window"] = window or family.defaults.get("sliding_window")
        content["layer_types"] = [SLIDING if window else FULL for window in windows]
        if family.kind == "gemma2":
            content["attn_logit_softcapping"] = scores[0].soft_cap
        else:
            content["use_sliding_window"] = window is not None
    return content


def essence(model: GPTConfig, scores: Sequence[Score], vocab_size: int) -> dict[str, Any]:
    """A model's options by name, equal for equal models: null is replaced by its meaning, and options of training are
    left out."""
    values = {f.name: getattr(model, f.name) for f in fields(model) if f.name not in ("name", "dropout", "mtp")}
    values |= {
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "vocab_size": vocab_size,
        "mlp_width": model.mlp_width or 4 * model.n_embd,
        "scale_dim": model.scale_dim or model.head_size,
        "norm_eps": model.norm_eps or EPS,
        "qk_eps": (model.norm_eps or QK_EPS) if model.qk_norm else None,
        "score": [*scores],
    }
    if model.positions is not Positions.rotary:
        return {name: value for name, value in values.items() if not name.startswith("rope_")}
    scaling = model.rope_scaling
    if scaling.kind in FAST:
        scaling = replace(scaling, fast=scaling.fast or FAST[scaling.kind], slow=scaling.slow or SLOW)
    layers = None if all(model.rope_layers or [True]) else model.rope_layers
    return values | {"rope_scaling": scaling, "rope_fraction": model.rotated, "rope_layers": layers}


def checkpoint_in(folder: Path) -> Path | None:
    """nanoGPT's or nanochat's checkpoint in a folder."""
    return next((path for pattern in CHECKPOINTS for path in sorted(folder.glob(pattern))), None)


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
    values: dict[str, Any] = {name: number(options, key, source) for name, key in NANOGPT_SIZES.items()}
    model = GPTConfig(name="nanogpt", mlp=Activation.gelu_exact, bias=bool(options.get("bias")), **values)
    for flaw in model_mistakes(model):
        raise WeightsError(f"init_from={source} describes no model: {flaw}")
    family = replace(FAMILIES["gpt2"], transposed=False, zeros=None, parts={})
    return Settings(family, model, ScoreConfig(), number(options, "block_size", source))
