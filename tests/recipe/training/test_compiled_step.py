"""A compiled step is one graph, compiled once: whatever changes from step to step is an input to it."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch

from attention import AttentionConfig, build_attention
from data.batches import Batch
from model.gpt import GPT, Computation
from model.loss import LossKind
from model.options import GPTConfig, Recompute
from recipe.distributed.world import World
from recipe.run.build import build_trainer
from recipe.run.config import Config
from recipe.training.device import Precision
from recipe.training.optimizer import ScheduleConfig
from recipe.training.options import TrainingConfig
from recipe.training.step import Trainer

CPU = torch.device("cpu")
T, B, VOCAB = 32, 2, 90


def trainer(
    compile: bool,
    precision: Precision = Precision.fp32,
    n_layers: int = 1,
    layers: list[str] | None = None,
    **options: Any,
) -> Trainer:
    training = TrainingConfig(
        steps=10,
        batch_size=B,
        batch_tokens=2 * B * T,
        precision=precision,
        compile=compile,
    )
    torch.manual_seed(0)
    shape = GPTConfig(n_layers=n_layers, n_heads=2, n_embd=32, dropout=0.1, layers=layers)
    model = GPT(
        shape,
        VOCAB,
        T,
        build_attention(AttentionConfig(dropout=0.1)),
        Computation(**options),
    )
    config = Config(seed=7, model=shape, schedule=ScheduleConfig(warmup_steps=2), training=training)
    return build_trainer(config, model, CPU, World())


def batches(step: int) -> list[Batch]:
    tokens = torch.randint(VOCAB, (2, 2, B, T), generator=torch.Generator().manual_seed(step))
    return [Batch(inputs, targets) for inputs, targets in tokens]


@pytest.mark.slow
def test_the_blocks_of_a_hybrid_are_compiled_once_for_each_kind(monkeypatch):
    """The compiler stops after eight versions of a function, and would leave later blocks as they are."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    graphs = []
    for n_layers in (2, 4):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        two = (trainer(x, n_layers=n_layers, layers=["gdn", "attention"]) for x in (True, False))
        loss, expected = (x.update(0, batches(0))["train/loss"] for x in two)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "loss": LossKind.chunked,
            "precision": Precision.bf16,
            "residual_in_fp32": False,
            "recompute": Recompute.block,
        },
        {"recompute": Recompute.attention},
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
        loss, expected = (x.update(step, batches(step))["train/loss"] for x in (compiled, plain))
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
        compiled.evaluate(batches(99))
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
        assert at_once.update(step, batches(step)) == one_by_one.update(step, batches(step))
