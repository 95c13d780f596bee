"""The model against independent references: FLOP counting, complex rotations, expanded key/value heads, autograd."""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attention import AttentionConfig, Score, SDPABackend, build_attention
from attention.dropout import DropoutKey, keep_mask
from attention.flash import op
from attention.interface import AttentionShape
from attention.naive import NaiveAttention
from model.counting import num_parameters
from model.embedding import Lookup, lookup_gradient
from model.gpt import GPT, Computation
from model.mlps import gelu
from model.options import GPTConfig, ModelError, Recompute
from tests.equal import assert_equal
from tests.parts import EVERYTHING, SMALL, built, window

KEY = DropoutKey(seed=1, step=2, layer=0, first_sequence=3)


def test_initialisation_is_gpt2s():
    model = built(GPTConfig(n_layers=8, n_heads=4, n_embd=128, bias=True), vocab_size=2000)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif ".ln_" in name or name.startswith("ln_"):
            assert (parameter == 1).all()
        else:
            std = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert parameter[:2000].std().item() == pytest.approx(std, rel=0.06), name
    assert built().forward(*window()).item() == pytest.approx(math.log(100), abs=0.1)


def test_number_of_parameters_is_gpt2s():
    with torch.device("meta"):
        model = built(GPTConfig(n_layers=12, n_heads=12, n_embd=768, bias=True), vocab_size=50257, seq_len=1024)
    assert num_parameters(model) == 124_439_808  # transformers' GPT2LMHeadModel("gpt2").num_parameters()
    padding = 28 * (2 * 24 + 16)  # of embedding, head and a value embedding of two heads
    everything = built(EVERYTHING)
    assert num_parameters(everything) == sum(p.numel() for p in everything.parameters()) - padding


def test_gradient_of_the_lookup_is_that_of_indexing():
    weight = torch.randn(10, 4, requires_grad=True)
    tokens, d_out = torch.randint(10, (3, 7)), torch.randn(3, 7, 4)
    (expected,) = torch.autograd.grad(weight[tokens], weight, d_out)
    (gradient,) = torch.autograd.grad(Lookup.apply(weight, tokens), weight, d_out)
    assert_close(gradient, expected)
    torch.library.opcheck(lookup_gradient, (d_out, tokens, 10))


class Spy(NaiveAttention):
    """Records the shapes and keys of its calls."""

    def __init__(self) -> None:
        super().__init__(AttentionConfig())
        self.shapes: list[AttentionShape] = []
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self.keys: list[Tensor | None] = []

    def check(self, shape: AttentionShape) -> None:
        self.shapes.append(shape)

    def attend(self, q, k, v, call):
        self.calls.append((q, k, v))
        self.keys.append(call.dropout_key)
        return super().attend(q, k, v, call)


def test_attention_receives_views_of_the_fused_projection():
    spy = Spy()
    GPT(replace(SMALL, n_kv_heads=2), 100, 16, spy)(window()[0])
    assert len(spy.calls) == SMALL.n_layers
    for q, k, v in spy.calls:
        assert (q.shape, k.shape, v.shape) == ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8))
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.stride()[-1] == k.stride()[-1] == v.stride()[-1] == 1


def test_attention_is_asked_when_the_model_is_built():
    spy = Spy()
    GPT(replace(SMALL, n_kv_heads=2), 100, 16, spy, Computation(device="cuda", dtype=torch.bfloat16))
    assert spy.shapes == [AttentionShape(8, 4, 2, torch.bfloat16, torch.device("cuda"), (Score(), Score()))]


def test_each_layer_has_a_separate_mask():
    spy = Spy()
    spy.dropout = 0.5
    GPT(SMALL, 100, 16, spy)(window()[0], dropout_key=KEY)
    keys = [replace(KEY, layer=layer).pack(torch.device("cpu")) for layer in range(2)]
    assert torch.equal(torch.stack([key for key in spy.keys if key is not None]), torch.stack(keys))


@pytest.mark.parametrize("recompute", Recompute)
def test_each_site_of_the_residual_stream_has_a_separate_mask(recompute):
    """Site 0 is the embedding, 1 + 2 l the attention of block l and 2 + 2 l its MLP."""
    model = built(replace(SMALL, dropout=0.25), name="sdpa", computation=Computation(recompute))
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def remember(name, _, given, out):
        seen[name] = (given[0].detach(), (out[0] if isinstance(out, tuple) else out).detach())

    for name, module in model.named_modules():
        if re.fullmatch(r"h\.\d+(\.attn|\.mlp)?", name):
            module.register_forward_hook(partial(remember, name))
    tokens, _ = window()
    model.hidden(tokens, KEY)
    weight = keep_mask(replace(KEY, layer=2**16 - 1), 0.25, 2, 5, 16, SMALL.n_embd) / 0.75
    embedded = model.wte(tokens) + model.wpe.weight
    assert_close(seen["h.0"][0], embedded * weight[:, 0])
    for layer in range(SMALL.n_layers):
        (x, out), (_, attended), (_, mlp) = (seen[f"h.{layer}{part}"] for part in ("", ".attn", ".mlp"))
        assert_close(out, x + attended * weight[:, 1 + 2 * layer] + mlp * weight[:, 2 + 2 * layer])


@pytest.mark.parametrize(("attention", "residual"), [(0.1, 0.0), (0.0, 0.1)])
def test_dropout_without_a_key_is_refused_in_training(attention, residual):
    with pytest.raises(ModelError, match="need a dropout_key in training mode"):
        built(replace(SMALL, dropout=residual), dropout=attention)(*window())


def step(model: GPT, function: Any, B: int = 2) -> tuple[int, list[Tensor]]:
    """The bytes that a step through `function` stores for its backward pass; and its loss and gradients."""
    tensors: dict[int, int] = {}

    def keep(tensor):
        tensors[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = function(*window(B), dropout_key=KEY)
    loss.backward()
    return sum(tensors.values()), [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_recomputation_stores_less():
    config, stored = replace(SMALL, dropout=0.1), []
    for recompute in (Recompute.none, Recompute.attention, Recompute.block):
        model = built(config, dropout=0.1, name="tiled", computation=Computation(recompute))
        stored.append(step(model, model)[0])
    assert stored[0] > stored[1] > stored[2]


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.slow), "blocks compiled"])
def test_recomputing_around_attention_calls_the_kernel_once_and_changes_no_bit(way, monkeypatch):
    config = GPTConfig(n_layers=1, n_heads=2, n_embd=16, dropout=0.1)
    kernel, results, stored = Mock(wraps=op.compute_forward), {}, {}
    monkeypatch.setattr(op, "compute_forward", kernel)
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
    calls = {Recompute.none: 1, Recompute.around_attention: 1} | ({Recompute.block: 2} if way == "eager" else {})
    for recompute, times in calls.items():
        torch._dynamo.reset()
        model = built(config, dropout=0.1, name="flash", computation=Computation(recompute))
        if way == "blocks compiled":  # as where ranks keep shards of the weights
            for block in model.h:
                block.forward = compiled(block.forward)
        kernel.reset_mock()
        stored[recompute], results[recompute] = step(model, compiled(model) if way == "compiled" else model, B=1)
        assert kernel.call_count == times * config.n_layers
    for other in calls:
        assert_equal(results[other], results[Recompute.none])
    # Outside compiled code, these hooks do not see what selective checkpointing keeps.
    assert stored[Recompute.around_attention] < stored[Recompute.none] * (0.7 if way == "compiled" else 0.5)


def test_recomputing_around_attention_is_refused_where_there_is_no_kernel():
    with pytest.raises(ModelError, match="attention=tiled names none; use training"):
        built(name="tiled", computation=Computation(Recompute.around_attention))
    attend = build_attention(AttentionConfig("sdpa", backend=SDPABackend.math))
    with pytest.raises(ModelError, match="attention=sdpa names none"):
        GPT(SMALL, 100, 16, attend, Computation(Recompute.around_attention))


def test_gelu_is_the_same_function_compiled_and_not():
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64, requires_grad=True)
    phi = (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    (slope,) = torch.autograd.grad((x * phi).sum(), x)
    for f in (gelu, torch.compile(gelu, backend="aot_eager", fullgraph=True)):
        y = f(x)
        assert_close(y, x * phi)
        assert_close(torch.autograd.grad(y.sum(), x)[0], slope)


@pytest.mark.slow
def test_a_compiled_step_stores_the_masks_of_the_residual_stream_as_bits():
    torch._dynamo.reset()
    model = built(replace(SMALL, dropout=0.1))
    stored: dict[int, int] = {}

    def keep(tensor):
        if tensor.dtype in (torch.uint8, torch.bool):
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    # This backend splits the work between forward and backward as torch's default one does.
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compiled(*window(), dropout_key=KEY)
    loss.backward()
    a_byte_each = 5 * 2 * 16 * SMALL.n_embd
    assert sum(stored.values()) < a_byte_each / 2  # half of the bits are padding here


def test_more_tokens_than_seq_len_are_refused():
    with pytest.raises(ModelError, match="17 tokens are more than seq_len=16; raise seq_len"):
        built()(torch.zeros(1, 17, dtype=torch.long))
