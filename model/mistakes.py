"""Mistakes in the options of a GPT."""

from collections.abc import Iterator

import torch

from attention.dropout import RATES, is_valid_rate
from mixers import MixerError
from mixers.fla import check_device
from mixers.layers import MIXERS, build_mixer
from model.options import (
    ATTENTION,
    AttentionBias,
    GPTConfig,
    Mixing,
    ModelError,
    Norm,
    NormOver,
    NormScale,
    Positions,
    RopeScaling,
    Scaling,
    misfit,
)


def check_config(config: GPTConfig) -> None:
    """Raise ModelError where a model's options do not fit together."""
    for sentence in model_mistakes(config):
        raise ModelError(sentence)


def model_mistakes(config: GPTConfig) -> Iterator[str]:
    """A sentence for each value that no model can have, with the change that helps."""
    if not is_valid_rate(config.dropout):
        yield f"model.dropout={config.dropout} must be {RATES}."
    sizes = ("n_layers", "n_heads", "n_embd", "head_dim", "mlp_width", "vocab_size", "scale_dim")
    too_small = [name for name in sizes if (value := getattr(config, name)) is not None and value < 1]
    yield from (f"model.{name}={getattr(config, name)} must be at least 1." for name in too_small)
    if too_small:
        return
    if config.head_dim is None and config.n_embd % config.n_heads:
        yield (
            f"model.n_embd={config.n_embd} is not a multiple of model.n_heads={config.n_heads}; "
            f"choose model.n_heads among {divisors(config.n_embd)}, or set model.head_dim."
        )
        return
    if config.n_kv_heads is not None and (config.n_kv_heads < 1 or config.n_heads % config.n_kv_heads):
        yield (
            f"model.n_heads={config.n_heads} is not a multiple of model.n_kv_heads={config.n_kv_heads}; "
            f"choose model.n_kv_heads among {divisors(config.n_heads)}."
        )
    for name in ("norm_eps", "logit_cap"):
        if (value := getattr(config, name)) is not None and not value > 0:
            yield f"model.{name}={value} must be above 0, or null."
    if not config.mtp >= 0:
        yield f"model.mtp={config.mtp} must not be negative; model.mtp=0 leaves the second head out."
    if not 0 <= 2 * config.value_embeddings <= config.n_layers:
        yield (
            f"model.value_embeddings={config.value_embeddings} must lie between 0 and half of model.n_layers="
            f"{config.n_layers}: the first and the last so many layers have them."
        )
    if config.value_residual and config.n_layers == 1:
        yield "model.value_residual=true needs at least two layers; leave it out, or raise model.n_layers."
    yield from without_effect(config)
    yield from mixer_mistakes(config)
    if config.positions is Positions.rotary:
        yield from rotary_mistakes(config)


def check_mixers(config: GPTConfig, device: torch.device) -> None:
    """Raise MixerError where the device cannot compute a model's mixers."""
    if config.mixers and config.mixer is Mixing.fla:
        check_device(device)


def mixer_mistakes(config: GPTConfig) -> Iterator[str]:
    """A sentence for each mistake in which layers have a mixer."""
    pattern, names = config.layers, (ATTENTION, *MIXERS)
    if pattern is not None and (sentence := misfit("model.layers", pattern, config.n_layers)):
        yield sentence
        return
    if unknown := [name for name in pattern or [] if name not in names]:
        yield f"model.layers has {unknown[0]}; an entry is one of {', '.join(names)}."
        return
    if not config.mixers:
        if config.mixer is not Mixing.chunked:
            yield f"model.mixer={config.mixer.value} has no effect without a mixer among model.layers; leave it out."
        return
    for name in sorted(set(config.mixers.values())):
        try:
            with torch.device("meta"):
                build_mixer(name, config.n_embd, config.n_heads)
        except MixerError as error:
            yield f"model.layers has {name}: {error}"
    for option in ("value_residual", "value_embeddings", "mtp"):
        if getattr(config, option):
            yield f"model.{option} needs attention in every layer; leave it out, or model.layers."


def without_effect(config: GPTConfig) -> Iterator[str]:
    """A sentence for each option that another one makes meaningless."""
    if config.norm_scale is NormScale.plus_one and config.norm is Norm.layer:
        yield "model.norm_scale=plus_one is RMS norm's; set model.norm=rms, or leave it out."
    if config.qk_norm_over is not NormOver.head and not config.qk_norm:
        yield f"model.qk_norm_over={config.qk_norm_over.value} has no effect without norms; set model.qk_norm=true."
    if config.attention_bias is not AttentionBias.none and config.bias:
        yield (
            f"model.attention_bias={config.attention_bias.value} has no effect with model.bias=true, which gives every "
            "linear layer a bias; leave one of them out."
        )
    if config.positions is Positions.rotary:
        return
    default = GPTConfig()
    for name in ("rope_base", "rope_fraction", "rope_layers", "rope_scaling"):
        if getattr(config, name) != getattr(default, name):
            yield (
                f"model.{name} has no effect with model.positions={config.positions.value}; "
                "set model.positions=rotary, or leave it out."
            )


def rotary_mistakes(config: GPTConfig) -> Iterator[str]:
    """A sentence for each value that rotary positions cannot have."""
    if not config.rope_base > 1:
        yield f"model.rope_base={config.rope_base} must be above 1, such as 10000."
    if not 0 < config.rope_fraction <= 1:
        yield f"model.rope_fraction={config.rope_fraction} must be above 0 and at most 1."
    elif config.rotated % 2 or config.rotated == 0:
        of = f"{config.rope_fraction} of " if config.rope_fraction < 1 else ""
        remedy = "another model.rope_fraction or " if of else ""
        yield (
            f"model.positions=rotary turns pairs of channels, and {of}heads of {config.head_size} channels "
            f"{'are no even number' if of else f'({heads_of(config)}) are odd'}; use {remedy}model.positions=learned."
        )
    pattern = config.rope_layers
    if pattern is not None and (sentence := misfit("model.rope_layers", pattern, config.n_layers)):
        yield sentence
    elif pattern is not None and not any(pattern):
        yield "model.rope_layers leaves no layer with positions; use model.positions=none instead."
    yield from scaling_mistakes(config.rope_scaling)


def heads_of(config: GPTConfig) -> str:
    """Where the size of a head comes from."""
    if config.head_dim is not None:
        return f"model.head_dim={config.head_dim}"
    return f"model.n_embd={config.n_embd} / model.n_heads={config.n_heads}"


def scaling_mistakes(scaling: RopeScaling) -> Iterator[str]:
    """A sentence for each value that no scaling can have."""
    kind, at = scaling.kind, "model.rope_scaling"
    if kind is Scaling.none:
        if scaling != RopeScaling():
            yield f"{at} has values and no kind; set {at}.kind=linear, yarn or llama3, or leave them out."
        return
    if not scaling.factor >= 1:
        yield f"{at}.factor={scaling.factor} must be at least 1, the growth of the longest sequence."
    of_yarn, of_both = ("truncate", "attention_factor"), ("original", "fast", "slow")
    for name in {Scaling.linear: (*of_both, *of_yarn), Scaling.llama3: of_yarn}.get(kind, ()):
        if getattr(scaling, name) != getattr(RopeScaling, name):
            yield f"{at}.{name}={getattr(scaling, name)} has no effect with {at}.kind={kind.value}; leave it out."
    if kind is not Scaling.linear and (scaling.original is None or scaling.original < 1):
        yield f"{at}.kind={kind.value} needs {at}.original, the longest sequence of the training before."
    if scaling.fast is not None and scaling.slow is not None and not scaling.fast > scaling.slow > 0:
        yield f"{at}.fast={scaling.fast} must be above {at}.slow={scaling.slow}, and both above 0."


def divisors(n: int) -> str:
    """The divisors of n up to 64, for error messages."""
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
