"""Our kernels under torch's switch on a GPU: the calls that torch gives to its FlashAttention, in training too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import AttentionConfig, UnsupportedAttention, build_attention
from attention.adapters import torch_sdpa
from attention.check.cases import Case
from attention.check.subject import find
from tests.attention.subjects import assert_judged_right


@pytest.fixture
def active():
    torch_sdpa.register()
    nn.attention.activate_flash_attention_impl(torch_sdpa.NAME)
    yield
    nn.attention.restore_flash_attention_impl()


def sdpa(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def tensors():
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, 4, 515, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def test_the_switch_exchanges_the_kernels_and_gives_torchs_back():
    q, k, v = tensors()
    ours, theirs = build_attention(AttentionConfig("flash"))(q, k, v).out, sdpa(q, k, v)
    torch_sdpa.register()
    nn.attention.activate_flash_attention_impl(torch_sdpa.NAME)
    switched = sdpa(q, k, v)
    nn.attention.restore_flash_attention_impl()
    assert torch.equal(switched, ours)
    assert not torch.equal(theirs, ours)
    assert torch.equal(sdpa(q, k, v), theirs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sdpa_and_varlen_attn_compute_the_formula_and_its_gradients(dtype, active):
    for name, case in (
        ("sdpa-flash", Case(T=515, S=515, D=64, B=2, H=4, H_kv=2, dtype=dtype)),
        ("sdpa-flash", Case(T=129, S=300, D=128, causal=False, dtype=dtype)),
        ("sdpa-flash", Case(T=200, S=200, D=20, dtype=dtype, memory="heads between tokens")),
        ("varlen", Case(T=300, S=300, D=64, H=4, H_kv=4, documents=(3, 200, 97), dtype=dtype)),
        ("varlen", Case(T=300, S=300, D=64, B=2, window=70, dtype=dtype)),
    ):
        assert_judged_right(find(name), case, "cuda")


def test_a_compiled_layer_of_torch_runs_them_with_the_same_result(active):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def run(x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return layer(x, x, x, need_weights=False)[0]

    found = []
    for attend in (run, torch.compile(run)):
        out = attend(x)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.01 * a.norm()


def test_dropout_is_refused(active):
    q, k, v = tensors()
    with pytest.raises(UnsupportedAttention, match="set dropout_p to 0"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
