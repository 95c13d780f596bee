"""Models of transformers with this library's attention, against their eager attention."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attention import DropoutKey, Layout, UnsupportedAttention, keep_mask

transformers = pytest.importorskip("transformers")

from attention.adapters.transformers import Visible, attend, dropout_key, register  # noqa: E402
from tests.attention.subjects import SMALL  # noqa: E402
from tests.equal import assert_equal  # noqa: E402

T, VOCAB = 24, SMALL["vocab_size"]


def configurations(window: int, soft_cap: float, **changed: int) -> dict[str, Any]:
    """Of a model of each kind, with other sizes than SMALL's."""
    sizes = SMALL | changed
    width, length = sizes["hidden_size"], sizes["max_position_embeddings"]
    return {
        "gpt2": transformers.GPT2Config(n_layer=2, n_head=4, n_embd=width, vocab_size=VOCAB, n_positions=length),
        "llama": transformers.LlamaConfig(**sizes),
        "gemma2": transformers.Gemma2Config(**sizes, sliding_window=window, attn_logit_softcapping=soft_cap),
        "gpt_oss": transformers.GptOssConfig(
            **sizes, sliding_window=window, num_local_experts=2, num_experts_per_tok=1
        ),
    }


CONFIGURATIONS = configurations(5, 2.0)
MODELS = pytest.mark.parametrize("model", CONFIGURATIONS, indirect=True)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def build(configuration: Any, spread: float = 0.2) -> Any:
    """A model with its eager attention, large enough weights for attention to matter, and no dropout."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return model


@pytest.fixture
def model(request) -> Any:
    return build(CONFIGURATIONS[request.param])


def tokens(seed: int = 1, length: int = T) -> Tensor:
    return torch.randint(1, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def results(model: Any, name: str, inputs: dict[str, Any], real: Tensor | None = None) -> list[Tensor]:
    """The logits of real tokens, and the gradients of all parameters."""
    model.set_attn_implementation(name)
    model.zero_grad()
    logits = model(**inputs).logits
    logits = logits if real is None else logits[real]
    logits.square().mean().backward()
    assert model.config._attn_implementation == name
    return [logits, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_near(ours: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * max(1.0, y.abs().max().item()))


def assert_near_eager(model: Any, name: str, inputs: dict[str, Any], real: Tensor | None = None) -> None:
    assert_near(results(model, name, inputs, real), results(model, "eager", inputs, real))


@MODELS
@pytest.mark.parametrize("name", ["naive", "tiled", "flash"])
def test_logits_and_gradients_are_those_of_eager_attention(model, name):
    if name == "flash" and torch.cuda.is_available():  # without a GPU its kernels run in Triton's interpreter
        model.to("cuda")
    assert_near_eager(model, f"gpt_attention_{name}", {"input_ids": tokens().to(model.device), "use_cache": False})


@MODELS
def test_padding_before_and_after_a_sequence_is_hidden(model):
    real = torch.ones(2, T, dtype=torch.bool)
    real[0, :7], real[1, 20:] = False, False
    inputs = {"input_ids": tokens(), "attention_mask": real.long(), "use_cache": False}
    assert_near_eager(model, "gpt_attention_tiled", inputs, real)


@MODELS
def test_sequences_packed_in_a_row_do_not_see_each_other(model):
    positions = torch.cat([torch.arange(9), torch.arange(1), torch.arange(14)]).expand(2, T)
    inputs = {"input_ids": tokens(), "position_ids": positions, "use_cache": False}
    assert_near_eager(model, "gpt_attention_tiled", inputs)


def generated(model: Any, name: str, prompt: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The logits of tokens that follow a prompt."""
    model.set_attn_implementation(name)
    options |= {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(prompt, **options, disable_compile=True).logits


@MODELS
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [4, 0])
def test_generation_with_a_cache_has_the_logits_of_eager_attention(model, cache, padding):
    prompt = tokens(length=9)
    mask = torch.ones_like(prompt)
    mask[0, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "cache_implementation": cache}
    eager, ours = (generated(model, name, prompt, **options) for name in ("eager", "gpt_attention_tiled"))
    assert len(eager) == 12
    assert_near(ours, eager)


def test_a_single_query_sees_the_keys_up_to_its_own():
    mask, keys = Visible(True), torch.zeros(3, 1, 8, 4)
    assert mask.lengths(keys, True).tolist() == [8] * 3
    assert mask.lengths(keys, True) is mask.lengths(keys, True)
    assert Visible(True, layout=Layout(5)).lengths(keys, False)[0] == 6


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_a_model_is_built_with_the_kernels_by_name(model):
    ours = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="gpt_attention_flash")
    assert ours.config._attn_implementation == "gpt_attention_flash"


@pytest.mark.parametrize("window", [None, 5])
def test_layers_that_share_a_mask_compute_what_they_are_asked(window):
    """One that is like another before it is run without a look at it: others between them must not be."""
    layer: Any = None
    inputs = [x.requires_grad_() for x in torch.randn(3, 2, 4, 20, 16).unbind()]

    def computed(name, mask, queries, scale, softcap, s_aux, learns):
        q, k, v = inputs
        with torch.set_grad_enabled(learns):
            q = q[:, :, :queries]
            out, _ = attend(f"gpt_attention_{name}", layer, q, k, v, mask, scale, softcap=softcap, s_aux=s_aux)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)] if learns else [out]

    mask = Visible(True, window)
    cases = list(product((20, 1), (0.5, 2.0), (None, 3.0), (None, torch.ones(4)), (True, False)))
    for case in cases * 2:
        assert_near(computed("flash", mask, *case), computed("naive", mask, *case))
    assert len(mask.found) == 5  # two scales, with gradients and without; and lengths


@pytest.mark.parametrize("model", ["gpt2"], indirect=True)
def test_dropout_is_the_same_in_every_implementation_and_run_under_one_key(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # torch's dropout, which no key determines
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.25
    inputs = {"input_ids": tokens(), "use_cache": False}

    def drawn(name, step):
        with dropout_key(seed=1337, step=step):
            return results(model, f"gpt_attention_{name}", inputs)

    first = drawn("naive", 0)
    assert_equal(drawn("naive", 0), first)
    assert_near(drawn("tiled", 0), first)
    assert not torch.allclose(drawn("naive", 1)[0], first[0], atol=1e-3)
    with pytest.raises(UnsupportedAttention, match=r"here 0.25 of them.*`with .*dropout_key\(seed, step\):`"):
        results(model, "gpt_attention_tiled", inputs)


def test_a_layer_draws_the_mask_of_its_index():
    q, k, v = torch.randn(3, 2, 4, 20, 8).unbind()
    layer: Any = SimpleNamespace(layer_idx=3)
    with dropout_key(seed=5, step=7, first_sequence=11):
        out, _ = attend("gpt_attention_tiled", layer, q, k, v, None, dropout=0.25)
    keep = keep_mask(DropoutKey(5, 7, 3, 11), 0.25, 2, 4, 20, 20)
    p = (q @ k.mT / 8**0.5).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(out.transpose(1, 2), (p * keep / 0.75) @ v)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_inputs_that_attention_cannot_express_are_refused_and_never_ignored(model):
    model.set_attn_implementation("gpt_attention_tiled")
    holes = torch.ones(2, T)
    holes[0, 5] = 0
    for inputs, sentence in (
        ({"attention_mask": holes}, "does not support padding between the tokens"),
        ({"attention_mask": torch.zeros(2, 1, T, T)}, r"takes no mask of shape \(2, 1, 24, 24\)"),
        ({"cu_seq_lens_q": torch.tensor([0, T])}, "does not support cu_seq_lens_q"),
    ):
        with pytest.raises(UnsupportedAttention, match=sentence) as raised:
            model(tokens(), **inputs)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_options_that_the_kernels_lack_are_refused_by_their_names_in_transformers(model, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)
    model.set_attn_implementation("gpt_attention_flash")
    with pytest.raises(UnsupportedAttention) as raised:
        model.double()(tokens())
    assert str(raised.value) == (
        "attn_implementation=gpt_attention_flash takes fp32, bf16 or fp16, not torch.float64; choose one of these, or "
        "attn_implementation=gpt_attention_tiled."
    )


def test_masks_of_other_kinds_are_refused_by_name():
    masks = transformers.masking_utils
    padded = torch.arange(T).expand(2, T) > 3
    for create, arguments, sentence in (
        (masks.create_chunked_causal_mask, {}, "does not support the mask chunked_overlay"),
        (masks.create_causal_mask, {"and_mask_function": lambda b, h, i, j: i - j != 3}, "the mask function .*lambda"),
        (masks.create_bidirectional_mask, {"attention_mask": padded}, "padding .* as in an encoder"),
        (masks.create_bidirectional_sliding_window_mask, {}, "does not support the mask sliding_window_bidirectional"),
    ):
        configuration = transformers.LlamaConfig(**SMALL, attention_chunk_size=4, sliding_window=4)
        configuration._attn_implementation = "gpt_attention_tiled"
        given = {"past_key_values": None, "attention_mask": None} | arguments
        with pytest.raises(UnsupportedAttention, match=sentence):
            create(configuration, torch.zeros(2, T, 32), **given)
