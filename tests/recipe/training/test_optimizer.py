"""The optimizers' groups and updates against torch's, and the schedules against their formulas."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from bench.machine import ROOT
from model.gpt import GPT
from model.options import GPTConfig
from recipe.distributed.exchange import TwoTerms
from recipe.distributed.stacks import stacks
from recipe.errors import UserError
from recipe.training.checkpoint import save_checkpoint
from recipe.training.optimizer import (
    OPTIMIZERS,
    STACKED,
    OptimizerConfig,
    ScheduleConfig,
    build_adamw,
    build_muon,
    check_optimizer,
    learning_rate,
    orthogonal,
    set_learning_rate,
    update_parameters,
)
from recipe.training.state import gather_state, restore_state
from tests.equal import assert_equal
from tests.parts import built
from tests.recipe.training import test_loop

STEPS, PEAK = 1000, 3e-3
ONE, NEVER = torch.tensor(1.0), torch.tensor(False)
CPU = "recipe.training.optimizer.get_cpu_capability"


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def fill_gradients(model: nn.Module, step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def rates(schedule: ScheduleConfig) -> list[float]:
    return [learning_rate(step, STEPS, PEAK, schedule) for step in range(STEPS + 1)]


def test_auto_warms_up_for_a_tenth_of_the_steps_and_100_at_most():
    auto = ScheduleConfig()
    assert [auto.warmup(steps) for steps in (1, 3, 50, 999, 1200, 100_000)] == [0, 0, 5, 99, 100, 100]
    assert rates(auto) == rates(ScheduleConfig(warmup_steps=100))


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_every_schedule_warms_up_linearly_to_the_peak(name):
    warm = rates(ScheduleConfig(name=name, warmup_steps=100))[:101]
    assert warm == pytest.approx([PEAK * (step + 1) / 101 for step in range(101)])
    later = rates(ScheduleConfig(name=name, warmup_steps=0))
    assert later[0] == PEAK
    assert (later == [PEAK] * 1001) == (name == "constant")


def test_cosine_is_torchs_annealing_after_the_warm_up():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 100, eta_min=0.1 * PEAK)
    expected = []
    for _ in range(STEPS - 99):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        annealing.step()
    assert rates(ScheduleConfig(warmup_steps=100, min_lr_ratio=0.1))[100:] == pytest.approx(expected)


def test_wsd_holds_the_peak_and_gives_it_up_over_the_last_fifth():
    lr = rates(ScheduleConfig(name="wsd", warmup_steps=100, min_lr_ratio=0.2))
    assert lr[100:801] == [PEAK] * 701
    assert lr[850] == pytest.approx(PEAK * (0.2 + 0.8 * (1 - math.sqrt(50 / 200))))
    assert lr[1000] == pytest.approx(0.2 * PEAK)
    assert all(later < earlier for earlier, later in pairwise(lr[800:]))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_are_torchs_clipping_and_unfused_adamw(clip):
    model, reference = small_model(), small_model()
    optimizer = build_adamw(model, OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.95), clip=clip))
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        fused=False,
    )
    for step in range(5):
        lr = 0.01 * (step + 1)
        fill_gradients(model, step)
        fill_gradients(reference, step)
        norm = TwoTerms(list(model.parameters()), ranks=1).finish()
        set_learning_rate(optimizer, lr)
        update_parameters(optimizer, (norm / clip).clamp(min=1) if clip else ONE, NEVER)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip or math.inf)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close([*model.parameters()], [*reference.parameters()])


def small_gpt() -> GPT:
    return built(GPTConfig(n_layers=2, n_heads=4, n_kv_heads=2, n_embd=32, bias=True), 8, 20)


@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
def test_a_cpu_without_instructions_for_bf16_rounds_alike(shape, monkeypatch):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() / x.double().norm(dim=(1, 2), keepdim=True)
    for _ in range(5):  # Jordan et al. 2024
        products = exact @ exact.mT
        exact = 3.4445 * exact + (-4.7750 * products + 2.0315 * products @ products) @ exact
    errors = {}
    for cpu in ("AVX512", "AVX2"):
        monkeypatch.setattr(CPU, lambda cpu=cpu: cpu)
        errors[cpu] = (orthogonal(x) - exact).norm().item()
    assert errors["AVX2"] == pytest.approx(errors["AVX512"], rel=0.05)


def test_muon_is_torchs_for_each_hidden_matrix_and_adamw_for_the_rest(monkeypatch):
    monkeypatch.setattr(CPU, lambda: "AVX512")
    model, reference = small_gpt(), small_gpt()
    optimizer = build_muon(model, OptimizerConfig(name="muon", lr=0.02, muon_lr=0.04, momentum=0.9, weight_decay=0.1))
    fused = {f"h.{i}.attn.c_attn.weight" for i in range(2)}
    hidden = [n for n, p in reference.named_parameters() if p.ndim == 2 and n.startswith("h.")]
    assert len(hidden) == 8
    pieces = {  # queries, keys and values count as separate matrices
        name: [nn.Parameter(x.clone()) for x in p.detach().split([32, 16, 16] if name in fused else [len(p)])]
        for name, p in reference.named_parameters()
        if name in hidden
    }
    parts = [part for of_matrix in pieces.values() for part in of_matrix]
    muon = torch.optim.Muon(parts, lr=0.04, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    rest = nn.ModuleDict({"wte": reference.wte, "wpe": reference.wpe})
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    adamw = torch.optim.AdamW(
        [{"params": list(rest.parameters()), "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.99),
    )
    for step in range(5):
        lr = 0.02 / (step + 1)
        fill_gradients(model, step, size=2.0)
        fill_gradients(reference, step)
        gradients = dict(reference.named_parameters())
        for name, of_matrix in pieces.items():
            gradient = gradients[name].grad
            assert gradient is not None
            for part, own in zip(of_matrix, gradient.split([len(p) for p in of_matrix]), strict=True):
                part.grad = own
        for group in muon.param_groups:
            group["lr"] = 2 * lr
        for group in adamw.param_groups:
            group["lr"] = lr
        muon.step()
        adamw.step()
        set_learning_rate(optimizer, lr)
        update_parameters(optimizer, torch.tensor(2.0), NEVER)
    for name, parameter in model.named_parameters():
        expected = torch.cat([part.detach() for part in pieces[name]]) if name in pieces else gradients[name]
        torch.testing.assert_close(parameter, expected)


def test_muon_stacks_matrices_of_one_shape_within_its_memory():
    wide, tall = torch.Size([2**12, 2**13]), torch.Size([2**13, 2**12])
    matrices = [wide, tall, wide, torch.Size([2**20, 2**10]), wide, wide]
    assert stacks(matrices, STACKED) == [[0, 2], [4, 5], [1], [3]]


def page() -> dict[str, Any]:
    """The names that the code of docs/add-an-optimizer.md defines; it adds to a copy of OPTIMIZERS."""
    text = (ROOT / "docs" / "add-an-optimizer.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"torch": torch, "nn": nn, "OptimizerConfig": OptimizerConfig, "OPTIMIZERS": {**OPTIMIZERS}}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    return names


EVERY = page()["OPTIMIZERS"]


@pytest.mark.parametrize("name", EVERY)
def test_an_optimizer_divides_its_gradients_and_reads_its_learning_rate(name):
    """Clipping and the loss scale change nothing else: gradients and divisor 64 times as large give the same bits."""
    models = [small_gpt() for _ in range(3)]
    for model, scale, lr in zip(models, (1.0, 64.0, 1.0), (0.01, 0.01, 0.02), strict=True):
        optimizer = EVERY[name](model, OptimizerConfig(name))
        check_optimizer(optimizer, model, name)
        for step in range(3):
            fill_gradients(model, step, size=scale)
            set_learning_rate(optimizer, lr)
            update_parameters(optimizer, torch.tensor(scale), NEVER)
    plain, scaled, faster = ([p.detach() for p in model.parameters()] for model in models)
    assert_equal(scaled, plain)
    assert not any(torch.equal(a, b) for a, b in zip(plain, faster, strict=True))


def train_with(optimizer: str, clip: float = 1.0) -> list[float]:
    """Losses of four steps of the trainer."""
    return test_loop.losses(test_loop.build(steps=4, optimizer=OptimizerConfig(optimizer, lr=0.1, clip=clip)), range(4))


def test_the_optimizer_of_the_page_trains_and_is_clipped(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "sgd", EVERY["sgd"])
    losses, clipped = train_with("sgd"), train_with("sgd", clip=1e-9)
    assert losses[-1] < losses[0] - 0.1 < clipped[-1]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda model, config: torch.optim.SGD(model.parameters(), lr=torch.tensor(config.lr)), "optimizer.clip and"),
        (
            lambda model, config: torch.optim.AdamW(model.parameters(), lr=torch.tensor(config.lr), foreach=False),
            "build it with fused=True, or see docs/add-an-optimizer.md",
        ),
        (
            lambda model, config: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
            "schedule=... would have no",
        ),
        (
            lambda model, config: torch.optim.AdamW(model.h.parameters(), lr=torch.tensor(1e-3), fused=True),
            "does not update wte.weight",
        ),
    ],
)
def test_an_optimizer_that_would_ignore_part_of_the_training_is_refused(monkeypatch, build, sentence):
    monkeypatch.setitem(OPTIMIZERS, "own", build)
    with pytest.raises(UserError, match=re.escape(sentence)):
        train_with("own")


@pytest.mark.parametrize(("name", "frozen"), [*((name, False) for name in EVERY), ("adamw", True)])
def test_a_skipped_update_changes_no_bit_and_a_restored_optimizer_goes_on_with_the_same_ones(tmp_path, name, frozen):
    """Also if the model has parameters that are not trained."""
    build = EVERY[name]
    models = [small_gpt() for _ in range(3)]
    for model in models:
        model.wpe.requires_grad_(not frozen)
    optimizers = [build(model, OptimizerConfig()) for model in models]

    def train(which, first, last, disturbed=False):
        for step in range(first, last):
            fill_gradients(models[which], step)
            set_learning_rate(optimizers[which], 0.01 * (step + 1))
            update_parameters(optimizers[which], ONE, NEVER)
            if disturbed:
                fill_gradients(models[which], step, size=math.inf)
                update_parameters(optimizers[which], ONE, torch.tensor(True))

    train(0, 0, 4)
    train(1, 0, 2, disturbed=True)
    path = save_checkpoint(tmp_path, gather_state(models[1], optimizers[1], {}), 2, keep_last=1, metadata={})
    restore_state(path, models[2], optimizers[2], {})
    train(2, 2, 4, disturbed=True)
    uninterrupted, _, resumed = ([*model.parameters()] for model in models)
    assert_equal(resumed, uninterrupted)
