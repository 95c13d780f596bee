"""Implementations that have a name: this library's, torch's, transformers' and flash-attn's.

A name stands for import lines and an expression. Programs that reproduce a failure contain both.
"""

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

PACKAGE = __package__.partition(".")[0]


class Named(NamedTuple):
    """How to import and call an implementation.

    style     one of subject.STYLES; None: its parameters decide
    words     a description
    needs     its requirements besides the library, for the message where they are missing
    """

    imports: str
    expression: str
    style: str | None
    words: str
    needs: str = "torch 2.11 or newer"


# Packages, and how to install them, for error messages.
TRANSFORMERS = "transformers (`pip install transformers`)"
FA2 = "flash-attn 2 (`pip install flash-attn`)"
FA3 = "flash-attn 3 (built from the folder hopper of github.com/Dao-AILab/flash-attention)"
FA4 = "flash-attn 4 (`pip install --pre flash-attn-4`)"


def _ours(name: str, words: str) -> Named:
    imports = f"from {PACKAGE} import AttentionConfig, build_attention"
    return Named(imports, f"build_attention(AttentionConfig({name!r}))", "ours", words)


def _sdpa(backend: str, words: str) -> Named:
    imports = "from torch.nn.functional import scaled_dot_product_attention"
    if not backend:
        return Named(imports, "scaled_dot_product_attention", "sdpa", words)
    imports = f"from torch.nn.attention import SDPBackend, sdpa_kernel\n{imports}"
    return Named(imports, f"sdpa_kernel(SDPBackend.{backend})(scaled_dot_product_attention)", "sdpa", words)


def _transformers(name: str, package: str = "") -> Named:
    imports = f"from {PACKAGE}.check.named import from_transformers"
    words, needs = f"transformers' attn_implementation={name}", " and ".join(filter(None, (TRANSFORMERS, package)))
    return Named(imports, f"from_transformers({name!r})", "plain", words, needs)


NAMED = {
    "naive": _ours("naive", "the textbook formula of this library"),
    "tiled": _ours("tiled", "FlashAttention-2 in plain PyTorch, of this library"),
    "flash": _ours("flash", "the Triton kernels of this library"),
    "flex": _ours("flex", "torch's FlexAttention, through this library's masks"),
    "flex-masks": Named(
        "import torch\nfrom torch.nn.attention.flex_attention import flex_attention",
        "torch.compile(flex_attention, dynamic=False)",
        "flex",
        "torch's flex_attention, compiled, with functions and block masks",
    ),
    "sdpa": _sdpa("", "torch's scaled_dot_product_attention, the backend of its choice"),
    "sdpa-flash": _sdpa("FLASH_ATTENTION", "its FlashAttention"),
    "sdpa-efficient": _sdpa("EFFICIENT_ATTENTION", "its memory-efficient attention"),
    "sdpa-cudnn": _sdpa("CUDNN_ATTENTION", "its cuDNN attention"),
    "sdpa-math": _sdpa("MATH", "its formula"),
    "varlen": Named(
        "from torch.nn.attention.varlen import AuxRequest, varlen_attn",
        "varlen_attn",
        "varlen",
        "torch's varlen_attn",
        "torch 2.12 or newer",
    ),
    "hf-eager": _transformers("eager"),
    "hf-sdpa": _transformers("sdpa"),
    "hf-flex": _transformers("flex_attention"),
    "hf-fa2": _transformers("flash_attention_2", FA2),
    "hf-fa3": _transformers("flash_attention_3", FA3),
    "hf-fa4": _transformers("flash_attention_4", FA4),
    "fa2": Named("from flash_attn import flash_attn_func", "flash_attn_func", "flash", "flash-attn 2", FA2),
    "fa2-varlen": Named(
        "from flash_attn import flash_attn_varlen_func", "flash_attn_varlen_func", "varlen", "flash-attn 2, packed", FA2
    ),
    "fa3": Named("from flash_attn_interface import flash_attn_func", "flash_attn_func", "flash", "flash-attn 3", FA3),
    "fa3-varlen": Named(
        "from flash_attn_interface import flash_attn_varlen_func",
        "flash_attn_varlen_func",
        "varlen",
        "flash-attn 3, packed",
        FA3,
    ),
    "fa4": Named("from flash_attn.cute import flash_attn_func", "flash_attn_func", "flash", "flash-attn 4", FA4),
    "fa4-varlen": Named(
        "from flash_attn.cute import flash_attn_varlen_func",
        "flash_attn_varlen_func",
        "varlen",
        "flash-attn 4, packed",
        FA4,
    ),
}


def from_transformers(name: str) -> Callable[..., Tensor]:
    """An attention function of transformers, by its attn_implementation, called like a plain function.

    Raises ImportError where it is not installed.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    if name.startswith("flash_attention"):  # without the package, transformers would download kernels
        importlib.import_module({"2": "flash_attn", "3": "flash_attn_interface", "4": "flash_attn.cute"}[name[-1]])
    if name == "eager":  # each model has its own; Gemma 2's is the one with a soft cap
        return as_plain(eager_attention_forward, name)
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ImportError(f"transformers has no attn_implementation={name}")
    return as_plain(ALL_ATTENTION_FUNCTIONS[name], name)


def as_plain(function: Callable[..., Any], name: str = "sdpa") -> Callable[..., Tensor]:
    """An attention function of transformers, which takes a module and a mask, as a plain function of q, k and v.

    name  the attn_implementation whose masks it takes
    """
    from transformers import masking_utils

    accepted = set(inspect.signature(function).parameters)
    if name.startswith("flash_attention"):
        accepted = {"softcap", "s_aux", "dropout"}
    optional = {"soft_cap": "softcap", "sinks": "s_aux", "dropout_p": "dropout"}
    roles = [role for role, theirs in optional.items() if theirs in accepted]

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        causal, window, scale = options["causal"], options.get("window"), options.get("scale", q.shape[-1] ** -0.5)
        mask = masking_utils.bidirectional_mask_function
        if causal:
            mask = masking_utils.causal_mask_function
        if window is not None:
            mask = masking_utils.sliding_window_causal_mask_function(window)
        T, S = q.shape[2], k.shape[2]
        made = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[name](
            batch_size=q.shape[0],
            q_length=T,
            kv_length=S,
            q_offset=S - T if causal else 0,  # no query may have a position below 0, which the mask hides
            mask_function=mask,
            dtype=q.dtype,
            device=q.device,
            allow_is_causal_skip=T == S,
            local_size=window,
        )
        module = torch.nn.Module()
        vars(module).update(
            num_key_value_groups=q.shape[1] // k.shape[1],
            head_dim=q.shape[-1],
            is_causal=causal,
            layer_idx=0,
            config=SimpleNamespace(_attn_implementation=name, dtype=q.dtype),
        )
        given = {optional[role]: options[role] for role in roles if role in options}
        if window is not None:
            given["sliding_window"] = window
        return function(module, q, k, v, made, scaling=scale, **given)[0].transpose(1, 2)

    parameters = [inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in "qkv"]
    parameters += [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in ("causal", "window", "scale", *roles)]
    attend.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    attend.without = {"empty"}  # type: ignore[attr-defined]  # its masks leave no row without a key
    return attend
