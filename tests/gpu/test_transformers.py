"""Models of transformers with the kernels on a GPU, against their eager attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from attention.transformers import dropout_key, register  # noqa: E402
from tests.attention.subjects import SMALL  # noqa: E402

T, VOCAB, FLASH = 300, SMALL["vocab_size"], "gpt_attention_flash"
SIZES = SMALL | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "max_position_embeddings": 512}
CONFIGURATIONS = {
    "gpt2": transformers.GPT2Config(n_layer=2, n_head=4, n_embd=256, vocab_size=VOCAB, n_positions=512),
    "llama": transformers.LlamaConfig(**SIZES),
    "gemma2": transformers.Gemma2Config(**SIZES, sliding_window=100, attn_logit_softcapping=20.0),
    "gpt_oss": transformers.GptOssConfig(**SIZES, sliding_window=100, num_local_experts=2, num_experts_per_tok=1),
}


def build(name: str) -> Any:
    """A model with weights large enough for attention to matter."""
    register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGURATIONS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.cuda()


def tokens(length: int = T) -> Tensor:
    return torch.randint(1, VOCAB, (2, length), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_generation_has_the_logits_of_eager_attention(name, cache):
    model, steps = build(name), []
    for implementation in ("eager", FLASH):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
        options |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
        steps.append(torch.stack(model.generate(tokens(200), **options).logits))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-3, atol=1e-4 * steps[0].abs().max().item())


def test_recomputed_activations_drop_the_same_weights():
    """On a GPU the backward pass, and so the recomputation, runs in another thread."""
    model = build("llama").train()
    model.set_attn_implementation(FLASH)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with dropout_key(seed=1337, step=3):
            model(tokens(), use_cache=False).logits.square().mean().backward()
        return [p.grad for p in model.parameters()]

    stored = gradients()
    model.gradient_checkpointing_enable()
    for recomputed, kept in zip(gradients(), stored, strict=True):
        torch.testing.assert_close(recomputed, kept, rtol=1e-4, atol=1e-5 * kept.abs().max().item())
