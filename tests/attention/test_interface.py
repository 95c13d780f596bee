"""Calls that break the contract are refused with a message that names a remedy."""

from typing import Any

import pytest
import torch

from attention import (
    IMPLEMENTATIONS,
    Ablation,
    AttentionConfig,
    AttentionError,
    AttentionShape,
    DropoutRng,
    ProductPrecision,
    SDPABackend,
    UnsupportedAttention,
)
from attention.interface import Call
from attention.naive import NaiveAttention
from recipe.errors import sentence_of
from tests.attention.reference import KEY, Case, build

SHAPE = AttentionShape(32, n_heads=4, n_kv_heads=2, dtype=torch.float32, device=torch.device("cpu"))


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UnsupportedAttention, match=r'name="flesh" is not known; choose one of naive, tiled, sdpa'):
        build("flesh")
    assert issubclass(UnsupportedAttention, AttentionError)


@pytest.mark.parametrize(
    ("name", "option", "value", "instead"),
    [
        ("naive", "block_q", 32, "leave it at 64 or choose attention=tiled"),
        ("sdpa", "ablate", Ablation.no_max_subtraction, "leave it at none or choose attention=tiled"),
        ("tiled", "precision", ProductPrecision.fp8, "leave it at inputs or choose attention=flash"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(name, option, value, instead):
    chosen = getattr(value, "value", value)
    with pytest.raises(UnsupportedAttention) as refusal:
        build(name, **{option: value})
    assert sentence_of(refusal.value) == f"attention.{option}={chosen} has no effect with attention={name}; {instead}."


def test_an_option_is_taken_by_its_name():
    by_name: Any = {"backend": "math"}
    assert AttentionConfig("sdpa", **by_name) == AttentionConfig("sdpa", backend=SDPABackend.math)
    by_name = {"path": "hoper"}
    with pytest.raises(AttentionError, match=r'path="hoper" is not one of auto, plain, hopper\.'):
        AttentionConfig("flash", **by_name)


@pytest.mark.parametrize("p", [-0.1, 0.001, 0.999, 1.0])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_dropout_that_the_mask_cannot_realise_is_refused(name, p):
    with pytest.raises(UnsupportedAttention, match=rf"dropout={p} must be 0 or between 1/256 and 255/256"):
        build(name, dropout=p)


@pytest.mark.parametrize(
    ("q", "k", "v", "complaint"),
    [
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 9, 16), "takes q"),
        ((4, 8, 16), (4, 8, 16), (4, 8, 16), "takes q"),
        ((2, 4, 8, 16), (1, 4, 8, 16), (1, 4, 8, 16), "agree in batch and head size"),
        ((2, 4, 8, 16), (2, 4, 8, 32), (2, 4, 8, 32), "agree in batch and head size"),
        ((2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16), "4 query heads are not a multiple of 3"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(q, k, v, complaint):
    with pytest.raises(ValueError, match=complaint):
        build("naive")(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_tensors_of_different_precision_and_integers_are_refused():
    x = torch.zeros(1, 1, 4, 8)
    for q, k in ((x, x.half()), (x.int(), x.int())):
        with pytest.raises(ValueError, match="must share a floating dtype and a device"):
            build("naive")(q, k, q)


def test_dropout_of_sdpa_needs_torchs_generator():
    with pytest.raises(UnsupportedAttention, match=r'dropout=0.1; set rng="torch"'):
        build("sdpa", dropout=0.1)


def test_dropout_of_sdpa_keeps_the_expectation_and_needs_a_key():
    q, k, v, _ = Case(64, 8, 8, 32, 32, 8).tensors(torch.float32)
    attend = build("sdpa", dropout=0.5, rng=DropoutRng.torch)
    exact = build("sdpa")(q, k, torch.ones_like(v)).out
    assert torch.equal(attend(q, k, torch.ones_like(v)).out, exact)
    torch.manual_seed(0)
    dropped = attend(q, k, torch.ones_like(v), dropout_key=KEY).out
    assert not torch.equal(dropped, exact)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)


def test_the_log_sum_exp_of_sdpa_is_not_to_be_had():
    q, k, v, _ = Case(1, 1, 1, 4, 4, 8).tensors(torch.float32)
    with pytest.raises(UnsupportedAttention, match=r'use name="naive", name="tiled" or name="flash"'):
        build("sdpa")(q, k, v, return_lse=True)


@pytest.mark.parametrize("backend", [SDPABackend.auto, SDPABackend.flash, SDPABackend.math])
def test_backends_of_sdpa_that_the_device_has_pass_the_check(backend):
    build("sdpa", backend=backend).check(SHAPE)


@pytest.mark.parametrize("backend", [SDPABackend.efficient, SDPABackend.cudnn])
def test_backends_of_sdpa_that_the_device_lacks_are_refused_when_the_model_is_built(backend):
    with pytest.raises(UnsupportedAttention, match=f'backend="{backend.value}" .*use backend="auto"'):
        build("sdpa", backend=backend).check(SHAPE)


def test_the_check_of_sdpa_leaves_the_generator_alone():
    before = torch.get_rng_state()
    build("sdpa", dropout=0.5, rng=DropoutRng.torch, backend=SDPABackend.math).check(SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", [SDPABackend.flash, SDPABackend.math])
def test_the_backend_of_sdpa_does_the_work(backend):
    q, k, v, _ = Case(1, 2, 2, 16, 16, 8).tensors(torch.float32)
    with torch.profiler.profile() as profile:
        build("sdpa", backend=backend)(q, k, v)
    called = {event.key for event in profile.key_averages()}
    assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in called) == (backend is SDPABackend.flash)


class ReturnsATensor(NaiveAttention):
    name = "returns_a_tensor"

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Any:
        return super().attend(q, k, v, call).out


def test_a_tensor_in_place_of_an_output_is_refused_and_not_unpacked_into_two_sequences():
    q, k, v, _ = Case(2, 2, 2, 8, 8, 8).tensors(torch.float32)
    with pytest.raises(
        AttentionError, match=r"returns_a_tensor returns a tensor from `attend`; return AttentionOutput"
    ):
        ReturnsATensor(AttentionConfig("returns_a_tensor"))(q, k, v)
