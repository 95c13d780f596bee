"""The last token of a text, decoded by the kernels for one token or by the model's own modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from attention import AttentionConfig, build_attention
from attention.layout import Layout
from model import one_token
from model.cache import CacheSize, Decode, KVCache, Prefill
from model.config import Activation, GPTConfig, Norm, NormScale, Positions
from model.forward import Pass
from model.gpt import GPT
from model.score import ScoreConfig
from recipe.infer.generation.steps import copied

VOCABULARY, LENGTH = 70, 70
GPT2 = GPTConfig(n_layers=2, n_heads=3, n_embd=24, bias=True)
LLAMA = replace(
    GPT2, n_heads=4, n_kv_heads=2, n_embd=32, bias=False, positions=Positions.rotary, norm=Norm.rms,
    mlp=Activation.swiglu, mlp_width=88, tied=False, rope_layers=[True, False],
)  # fmt: skip
GEMMA = replace(
    LLAMA, mlp=Activation.geglu, norm_scale=NormScale.plus_one, head_dim=16, logit_cap=5.0, rope_layers=None
)
PLAIN = replace(GPT2, mlp=Activation.relu2, norm_scale=NormScale.none, positions=Positions.none, bias=False)
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "gemma": GEMMA, "plain": PLAIN}
MANY = ScoreConfig(window=9, sinks=True)


def build(config: GPTConfig, score: ScoreConfig | None = None, device: str = "cpu") -> GPT:
    """A model with random biases and norms too."""
    torch.manual_seed(0)
    model = GPT(config, VOCABULARY, LENGTH, build_attention(AttentionConfig("naive")), score=score).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.2 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.add_(torch.randn_like(parameter), alpha=size)
    return model.eval()


@torch.no_grad()
def decoded(model: GPT, head: Tensor, kernels: bool, paged: bool, active: bool = True) -> tuple[Tensor, Tensor]:
    """The logits (1, VOCABULARY) after LENGTH tokens, and all keys and values; all but the last token are prefilled.

    head    with the dtype of the products and of the cache
    active  whether the cache has a sequence; if not, the logits mean nothing
    """
    device, n = head.device, LENGTH
    tokens = torch.randint(VOCABULARY, (1, n), generator=torch.Generator().manual_seed(1)).to(device)
    cache = KVCache(model.config, CacheSize(1, n, n // 64 + 1 if paged else None), device, head.dtype)
    cache.reserve(0, n, n)
    cache.publish()
    cache.lengths.fill_(n - 1)
    prefill = [Prefill(model.attend, layer, torch.tensor([0, n - 1], device=device)) for layer in cache.layers]
    attends = [Decode(build_attention(AttentionConfig("naive")), layer) for layer in cache.layers]
    narrow = head.dtype if head.itemsize == 2 else None
    with torch.autocast(device.type, narrow, enabled=narrow is not None, cache_enabled=False):
        model.extend(tokens[:, :-1], torch.arange(n - 1, device=device)[None], prefill, Layout(), None)
        cache.lengths.fill_(n if active else 0)
        embedded = model.embed(tokens[:, -1:], torch.tensor([[n - 1]], device=device))
        if kernels:
            logits = one_token.logits(model, one_token.through_blocks(model, embedded.x, attends, model.tables), head)
        else:
            x, _ = model.through_blocks(Pass(embedded, attends, Layout()))
            logits = model.logits(model.ln_f(x)[:, 0], head)
    return logits, torch.cat([x.flatten() for layer in cache.layers for x in (layer.k, layer.v)])


def errors(model: GPT, dtype: torch.dtype, paged: bool) -> list[tuple[float, float]]:
    """Of the logits, and of keys and values: the relative errors of kernels and of modules against fp64."""
    narrow, head = copied(model, dtype), model.head.detach().to(dtype)
    exact = decoded(copy.deepcopy(narrow).double(), head.double(), False, paged)
    found = [decoded(narrow, head, kernels, paged) for kernels in (True, False)]
    assert found[0][0].shape == exact[0].shape == (1, VOCABULARY)
    assert found[0][0].dtype == dtype
    return [
        (float((own - y).norm() / y.norm()), float((of_modules - y).norm() / y.norm()))
        for own, of_modules, y in zip(*found, exact, strict=True)
    ]
