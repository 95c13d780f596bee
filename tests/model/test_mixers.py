"""Models with mixers among their layers: mistakes, operations, and the same bits where they are promised."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attention import AttentionConfig, Score
from data.batches import Batch
from mixers import MixerError
from mixers.layers import LinearAttention, Mamba2
from model.attention import SelfAttention
from model.counting import flops_per_token
from model.gpt import GPT
from model.mistakes import model_mistakes
from model.options import GPTConfig, Mixing, Positions
from model.score import ScoreConfig
from recipe.distributed.options import DataParallel, ParallelConfig
from recipe.distributed.world import World
from recipe.errors import UserError
from recipe.infer.huggingface.export import describe
from recipe.infer.huggingface.settings import WeightsError
from recipe.run.build import attention_shape, build_trainer
from recipe.run.config import Config
from recipe.run.mistakes import mistakes
from recipe.training.device import Precision
from recipe.training.optimizer import OptimizerConfig
from recipe.training.options import TrainingConfig
from recipe.training.parity_probe import ParityConfig, check_parity
from recipe.training.step import Trainer
from tests.parts import built, window

CPU = torch.device("cpu")
T = 32  # two chunks
HYBRID = GPTConfig(n_layers=4, n_heads=4, n_embd=32, positions=Positions.rotary, layers=["gdn", "attention"])
PURE = replace(HYBRID, positions=Positions.none, n_layers=2)
build, drawn = partial(built, seq_len=T), partial(window, T=T)


def test_the_pattern_is_repeated_and_scores_are_those_of_the_layers_with_attention():
    config = replace(HYBRID, layers=["gdn", "mamba2", "kda", "attention"], n_layers=8)
    model = build(config, score=ScoreConfig(layers=[{}, {}, {}, {"window": 9}]))
    kinds = [type(getattr(block.attn, "mixer", block.attn)) for block in model.h]
    assert kinds == 2 * [LinearAttention, Mamba2, LinearAttention, SelfAttention]
    assert model.scores == (Score(window=9), Score(window=9))
    projections = [p for name, p in model.named_parameters() if name.endswith("mixer.o_proj.weight")]
    assert all(p.std().item() == pytest.approx(0.02 / 4, rel=0.1) for p in projections)  # 0.02 / sqrt(2 n_layers)


def trainer(model: GPT, optimizer: str = "adamw", **options: Any) -> Trainer:
    training = TrainingConfig(steps=10, batch_size=2, **options)
    config = Config(seed=7, training=training, model=model.config, optimizer=OptimizerConfig(optimizer))
    return build_trainer(config, model, CPU, World())


def train(of: Trainer, *steps: int) -> list[float]:
    batches = {step: [Batch(*drawn(seed=2 * step + micro)) for micro in range(2)] for step in steps}
    return [float(of.update(step, batches[step])["train/loss"]) for step in steps]


@pytest.mark.slow
def test_a_compiled_step_is_the_same_within_rounding_and_compiles_once(monkeypatch):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = replace(HYBRID, layers=["gdn", "mamba2"], n_layers=2, dropout=0.25)
    compiled, plain = (
        trainer(build(config, dropout=0.25), batch_tokens=4 * T, compile=compile) for compile in (True, False)
    )
    assert train(compiled, 0) == pytest.approx(train(plain, 0), rel=1e-5)
    graphs = counters["stats"]["unique_graphs"]
    assert train(compiled, 1, 2) == pytest.approx(train(plain, 1, 2), rel=1e-5)
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_operations_are_those_of_the_recurrences_beside_the_matrices():
    model = build(replace(PURE, layers=["gdn", "mamba2"]))
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and not n.endswith("conv.weight"))
    matrices -= (len(model.wte.weight) - 100) * 32
    recurrences = 6 * 4 * 6 * 12 + 4 * 8 * 16 * 8  # multiplications and additions with the states (K, V) of all heads
    assert flops_per_token(model, T, causal=True) == 6 * matrices + 3 * recurrences


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": ["gdn", "attention", "gdn"]}, "model.layers has 3 entries, which do not divide model.n_layers=4"),
        ({"layers": []}, "model.layers has 0 entries"),
        ({"layers": ["mamba3"]}, "model.layers has mamba3; an entry is one of attention, linear, "),
        ({"layers": None, "mixer": Mixing.fla}, "model.mixer=fla has no effect without a mixer among model.layers"),
        ({"n_embd": 40}, "model.layers has gdn: 30 channels of keys and 60 of values do not divide into 4 heads"),
        ({"value_residual": True}, "model.value_residual needs attention in every layer"),
        ({"mtp": 0.1}, "model.mtp needs attention in every layer"),
    ],
)
def test_layers_that_do_not_fit_are_refused_in_a_sentence(change, says):
    (sentence,) = model_mistakes(replace(HYBRID, **change))
    assert sentence.startswith(says)


def test_kernels_that_the_device_lacks_are_refused_when_the_model_is_built():
    with pytest.raises(MixerError, match="mixer=fla needs a GPU and not cpu; choose mixer=chunked"):
        build(replace(HYBRID, mixer=Mixing.fla))


def test_what_no_mixer_does_is_refused_in_a_sentence():
    config = Config(model=HYBRID, parallel=ParallelConfig(DataParallel.shard), device="cpu")
    (sentence,) = mistakes(config)
    assert sentence.startswith("Mixers in model.layers need parallel.data=replicate and parallel.context=1")
    with pytest.raises(WeightsError, match=r"No architecture of transformers has this model's model\.layers"):
        describe(build(HYBRID), attention_dropout=0.0)
    assert len(attention_shape(Config(model=HYBRID), CPU, torch.float32).scores) == 2
    shape = attention_shape(Config(model=replace(PURE, layers=["kda"])), CPU, torch.float32)
    with pytest.raises(UserError, match=r"parity\.every compares attentions, and model\.layers has none"):
        check_parity(ParityConfig(every=10), AttentionConfig(), shape)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_in_bf16_with_documents_moves_every_parameter(optimizer):
    layers = ["kda", "mamba2", "gla", "retnet"]
    model = build(replace(HYBRID, layers=layers), documents=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    starts = torch.zeros(2, T, dtype=torch.int32)
    starts[:, 19:] = 19
    step = trainer(model, optimizer, precision=Precision.bf16)
    assert step.update(0, [Batch(*drawn(), starts)])["train/loss"].isfinite()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
