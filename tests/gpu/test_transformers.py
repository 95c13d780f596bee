"""Models of transformers with the kernels on a GPU, against their eager attention."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from attention.adapters.transformers import Visible, attend, dropout_key, register
from tests.attention import test_transformers as small
from tests.equal import assert_equal

FLASH = "gpt_attention_flash"
CONFIGURATIONS = small.configurations(
    100, 20.0, hidden_size=256, head_dim=64, intermediate_size=256, max_position_embeddings=512
)


def build(name) -> Any:
    register()
    return small.build(CONFIGURATIONS[name], 0.1).cuda()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_generation_has_the_logits_of_eager_attention(name, cache):
    model, prompt = build(name), small.tokens(length=200).cuda()
    eager, ours = (
        torch.stack(small.generated(model, kind, prompt, max_new_tokens=6, cache_implementation=cache))
        for kind in ("eager", FLASH)
    )
    torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4 * eager.abs().max().item())


def test_recomputed_activations_drop_the_same_weights():
    """On a GPU the backward pass, and so the recomputation, runs in another thread."""
    model = build("llama").train()
    model.set_attn_implementation(FLASH)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25

    def gradients():
        model.zero_grad()
        with dropout_key(seed=1337, step=3):
            model(small.tokens(length=300).cuda(), use_cache=False).logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    stored = gradients()
    model.gradient_checkpointing_enable()
    for recomputed, kept in zip(gradients(), stored, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=1e-4, atol=1e-5 * kept.abs().max().item())


def test_a_replayed_call_computes_the_bits_of_the_first():
    """Also where its gradient lies in memory in another way."""
    layer: Any = None
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 4, 300, 64, device="cuda").bfloat16().unbind())

    def computed(do):
        out, _ = attend(FLASH, layer, q, k, v, Visible(True))
        return [out, *torch.autograd.grad(out, (q, k, v), do)]

    do = torch.randn(2, 300, 4, 64, device="cuda").bfloat16()
    first = computed(do)
    for x in (do, do, do.transpose(1, 2).contiguous().transpose(1, 2), do):
        assert_equal(computed(x), first)
