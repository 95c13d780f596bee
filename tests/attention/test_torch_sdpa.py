"""Our kernels in the place of torch's FlashAttention: the switch, and torch's operators in Triton's interpreter.

torch has no such operators for a CPU, so that those tested here are ours. tests/gpu/test_torch_sdpa.py uses the switch
on a GPU.
"""

from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch.nn.attention import varlen

from attention import UnsupportedAttention
from attention.adapters import torch_sdpa
from attention.check.cases import Case
from attention.check.subject import Subject, find
from tests.attention.subjects import assert_judged_right

aten = torch.ops.aten
with_varlen = pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch 2.11 has another varlen_attn")


@pytest.fixture
def active():
    """The kernels under torch's operators for a CPU."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels run on the GPU here: tests/gpu/test_torch_sdpa.py")
    handle = torch_sdpa.activate("CPU")
    yield
    handle.remove()


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def test_the_switch_makes_the_kernels_active_and_gives_torchs_back():
    def is_there():
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        return [has(f"aten::{name}", "CUDA") for name in torch_sdpa.KERNELS]

    before = is_there()
    torch_sdpa.register()
    assert torch_sdpa.NAME in nn.attention.list_flash_attention_impls()
    assert is_there() == before
    nn.attention.activate_flash_attention_impl(torch_sdpa.NAME)
    assert nn.attention.current_flash_attention_impl() == "gpt_attention_flash"
    assert all(is_there())
    nn.attention.restore_flash_attention_impl()
    assert is_there() == before


@pytest.mark.parametrize(
    "case",
    [
        Case(T=40, S=40, B=2, H_kv=1, memory="channels not adjacent"),
        Case(T=20, S=35, D=12, H=1, H_kv=1, causal=False, scale=0.7, dtype="bf16"),
        Case(T=35, S=20, H=1, H_kv=1),
    ],
)
def test_sdpa_computes_the_formula_and_its_gradients(case, active):
    features = frozenset({"causal", "full", "scale", "grouped", "empty", "lse"})
    assert_judged_right(Subject("sdpa", "", "sdpa", sdpa, "plain", features), case)


@with_varlen
@pytest.mark.parametrize(
    "case",
    [
        Case(T=40, S=40, H_kv=1, documents=(3, 20, 17)),
        Case(T=20, S=20, B=2, H=1, H_kv=1, window=7),
        Case(T=33, S=33, H=1, H_kv=1, causal=False),
    ],
)
def test_varlen_attn_computes_the_formula_and_its_gradients(case, active):
    assert_judged_right(find("varlen"), case)


@with_varlen
def test_varlen_attn_out_fills_the_tensor_that_it_is_given(active):
    q, bounds = torch.randn(12, 2, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, q, q, bounds, bounds, 7, 7, window_size=(-1, 0))
    expected = varlen.varlen_attn(q, q, q, bounds, bounds, 7, 7, window_size=(-1, 0))
    assert isinstance(expected, Tensor)
    assert torch.equal(out, expected)


def test_the_outputs_besides_out_have_the_shapes_that_torch_expects(active):
    q = torch.randn(2, 3, 20, 16)
    with torch.device("meta"):
        expected = aten._scaled_dot_product_flash_attention(*3 * [torch.empty_like(q)])
    for x, y in zip(aten._scaled_dot_product_flash_attention(q, q, q), expected, strict=True):
        assert type(x) is type(y)
        if isinstance(x, Tensor):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        else:
            assert x == y


def refuses(why: str) -> Any:
    return pytest.raises(UnsupportedAttention, match=f"gpt_attention_flash, which is active .*{why}.*sdpa_kernel")


def test_calls_that_the_kernels_lack_are_refused_with_a_remedy(active):
    q = torch.randn(1, 2, 8, 16)
    with refuses("set dropout_p to 0, not 0.1"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.1)
    with refuses("takes positive scales, not -1.0"):
        sdpa(q, q, q, scale=-1.0)


@with_varlen
def test_calls_of_varlen_attn_that_the_kernels_lack_are_refused(active):
    x = torch.randn(8, 2, 16)
    bounds, others = torch.tensor([0, 8], dtype=torch.int32), torch.tensor([0, 4, 8], dtype=torch.int32)
    with refuses("cu_seq_q and cu_seq_k must be equal"):
        varlen.varlen_attn(x, x, x, bounds, others, 8, 8)
    with refuses(r"\(3, 2\)"):
        varlen.varlen_attn(x, x, x, bounds, bounds, 8, 8, window_size=(3, 2))
    with refuses("seqused_k"):
        varlen.varlen_attn(x, x, x, bounds, bounds, 8, 8, seqused_k=bounds[1:])
