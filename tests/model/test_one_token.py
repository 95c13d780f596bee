"""The kernels for one new token, beside the model's own modules, both against fp64."""

from __future__ import annotations

from tests.interpreter import run_interpreted


def test_logits_keys_and_values_are_those_of_the_modules_up_to_rounding():
    run_interpreted("""
import torch
from tests.model.decoded import CONFIGS, MANY, build, errors

for name, config in CONFIGS.items():
    model = build(config, MANY if name == "llama" else None)
    for dtype in (torch.float32, torch.bfloat16):
        for paged in (False, True):
            for own, of_modules in errors(model, dtype, paged):
                assert 0 < own < 2 * of_modules, (name, dtype, paged, own, of_modules)
""")


def test_a_slot_without_a_sequence_writes_nothing():
    run_interpreted("""
import torch
from tests.model.decoded import LLAMA, build, decoded

model = build(LLAMA)
for paged in (False, True):
    before, after = (decoded(model, model.head.detach(), kernels, paged, False)[1] for kernels in (False, True))
    assert torch.equal(before, after)
""")


def test_greedy_texts_are_those_of_the_modules():
    """Through the engine, in fp32: a contiguous cache, and one in pages whose windows slide beyond seq_len."""
    run_interpreted("""
from unittest import mock
from dataclasses import replace
from model import one_token
from model.score import ScoreConfig
from recipe.infer.generation import Engine, Request, Sampling, steps
from tests.model.decoded import GPT2, LLAMA, build

def texts(model, longest):
    requests = [Request([5, 6, 7], 12), Request([9] * longest, 20), Request([1], 12)]
    engine = Engine(model, requests, Sampling(temperature=0.0), slots=1)
    for _ in engine.run():
        pass
    return engine, [request.tokens for request in requests]

for config, score, longest in ((GPT2, None, 20), (LLAMA, None, 20), (LLAMA, ScoreConfig(window=40), 60)):
    model = build(config, score)
    engine, expected = texts(model, longest)
    assert not engine.steps.one_token
    # On a CPU the modules' weights lie column by column, which the kernels do not read.
    with (
        mock.patch.object(one_token, "has_kernels", return_value=True),
        mock.patch.object(steps, "laid_out", lambda weight, by_column: weight),
    ):
        engine, found = texts(model, longest)
    assert engine.steps.one_token
    assert (engine.steps.cache.table is not None) == (longest == 60)
    assert found == expected
""")
