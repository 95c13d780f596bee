"""The kernels for one new token on a GPU, at the widths of real models, beside the model's own modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from model import one_token
from model.config import Gate, NormPlace
from recipe.infer.generation.steps import copied
from tests.model.decoded import CONFIGS, GEMMA, GPT2, LLAMA, MANY, build, errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ONE_B = replace(LLAMA, n_heads=32, n_kv_heads=8, n_embd=2048, mlp_width=8192, rope_layers=None)
SMALL = replace(GPT2, n_heads=12, n_embd=768)
SEVEN_B = replace(LLAMA, n_layers=1, n_heads=32, n_kv_heads=32, n_embd=4096, mlp_width=11008, rope_layers=None)
REAL = {"1B": ONE_B, "124M": SMALL, "7B": SEVEN_B}


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, *REAL])
def test_logits_keys_and_values_are_those_of_the_modules_up_to_rounding(name, dtype, paged):
    model = build((CONFIGS | REAL)[name], MANY if name == "llama" else None, "cuda")
    for own, of_modules in errors(model, dtype, paged):
        assert 0 < own < 2 * of_modules, (own, of_modules)


def test_models_with_other_parts_are_left_to_their_modules():
    def covered(config):
        model = copied(build(config, device="cuda"), torch.bfloat16)
        return one_token.has_kernels(model, model.head.detach().bfloat16())

    assert all(covered(config) for config in (GPT2, LLAMA, GEMMA))
    others: list[dict[str, Any]] = [
        {"qk_norm": True}, {"gate": Gate.head}, {"norm_place": NormPlace.both}, {"value_residual": True},
        {"rope_fraction": 0.5}, {"n_heads": 2, "n_embd": 36},
    ]  # fmt: skip
    assert not any(covered(replace(LLAMA, **given)) for given in others)
