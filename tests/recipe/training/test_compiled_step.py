"""A compiled step is one graph, compiled once: whatever changes from step to step is an input to it."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from model.gpt import Computation
from model.loss import LossKind
from model.options import Recompute
from recipe.training.device import Precision
from recipe.training.step import Trainer
from tests.recipe.training.test_loop import MODEL, B, T, build, micro_batches

SMALL = replace(MODEL, n_layers=1, dropout=0.1)


def trainer(compile: bool, **options: Any) -> Trainer:
    """Of steps of two micro-batches."""
    return build(**{"model": SMALL} | options, batch_tokens=2 * B * T, compile=compile)


@pytest.mark.slow
def test_the_blocks_of_a_hybrid_are_compiled_once_for_each_kind(monkeypatch):
    """The compiler stops after eight versions of a function, and would leave later blocks as they are."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graphs = []
    for n_layers in (2, 4):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = replace(SMALL, n_layers=n_layers, layers=["gdn", "attention"])
        two = (trainer(compile, model=model) for compile in (True, False))
        loss, expected = (x.update(0, micro_batches(x, 0))["train/loss"] for x in two)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "computation": Computation(Recompute.block, loss=LossKind.chunked, residual_in_fp32=False),
            "precision": Precision.bf16,
        },
        {"computation": Computation(Recompute.attention)},
    ],
)
def test_no_step_breaks_the_graph_or_compiles_again(options, monkeypatch, caplog):
    torch._dynamo.reset()
    torch._logging._internal.warning_once.cache_clear()
    log = logging.getLogger("torch._higher_order_ops.wrap")
    log.addHandler(caplog.handler)
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, plain = (trainer(compile, **options) for compile in (True, False))
    graphs = []
    for step in range(2):
        loss, expected = (x.update(step, micro_batches(x, step))["train/loss"] for x in (compiled, plain))
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        compiled.evaluate(micro_batches(compiled, 99))
        graphs.append(counters["stats"]["unique_graphs"])
    log.removeHandler(caplog.handler)
    assert graphs == [2, 2]  # training and evaluation
    assert not counters["graph_break"]
    assert "context_fn" not in caplog.text, "torch's reminder of recomputation"


def test_a_step_without_launches_between_its_micro_batches_is_the_same():
    """As a GPU replays it: all tensors at once, and only the first micro-step told its number."""
    at_once, one_by_one = (trainer(compile=False) for _ in range(2))
    at_once.replay = at_once._whole_step  # type: ignore[assignment]
    for step in range(3):
        batches = micro_batches(at_once, step)
        assert at_once.update(step, batches) == one_by_one.update(step, batches)
