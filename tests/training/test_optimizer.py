"""AdamW's groups and updates against torch's plain ones, and the schedules against their formulas."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from training.exchange import AnyOrder
from training.optimizer import (
    OptimizerConfig,
    ScheduleConfig,
    build_adamw,
    learning_rate,
    set_learning_rate,
    update_parameters,
)

STEPS, PEAK = 1000, 3e-3
ONE, NEVER = torch.tensor(1.0), torch.tensor(False)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def fill_gradients(model: nn.Module, step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def rates(schedule: ScheduleConfig) -> list[float]:
    return [learning_rate(step, STEPS, PEAK, schedule) for step in range(STEPS + 1)]


def test_auto_warms_up_for_a_tenth_of_the_steps_and_100_at_most() -> None:
    auto = ScheduleConfig()
    assert [auto.warmup(steps) for steps in (1, 3, 50, 999, 1200, 100_000)] == [0, 0, 5, 99, 100, 100]
    assert rates(auto) == rates(ScheduleConfig(warmup_steps=100))


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_every_schedule_warms_up_linearly_to_the_peak(name: str) -> None:
    warm = rates(ScheduleConfig(name=name, warmup_steps=100))[:101]
    assert warm == pytest.approx([PEAK * (step + 1) / 101 for step in range(101)])
    assert rates(ScheduleConfig(name=name, warmup_steps=0))[0] == PEAK


def test_cosine_is_torchs_annealing_after_the_warm_up() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 100, eta_min=0.1 * PEAK)
    expected = []
    for _ in range(STEPS - 99):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        annealing.step()
    assert rates(ScheduleConfig(warmup_steps=100, min_lr_ratio=0.1))[100:] == pytest.approx(expected)


def test_wsd_holds_the_peak_and_gives_it_up_over_the_last_fraction() -> None:
    lr = rates(ScheduleConfig(name="wsd", warmup_steps=100, min_lr_ratio=0.2, decay_fraction=0.25))
    assert lr[100:751] == [PEAK] * 651
    assert lr[800] == pytest.approx(PEAK * (0.2 + 0.8 * (1 - math.sqrt(50 / 250))))
    assert lr[1000] == pytest.approx(0.2 * PEAK)
    assert all(later < earlier for earlier, later in pairwise(lr[750:]))


def test_constant_stays() -> None:
    assert rates(ScheduleConfig(name="constant", warmup_steps=10))[10:] == [PEAK] * 991


def test_matrices_and_embeddings_decay_and_nothing_else() -> None:
    model = small_model()
    before = copy.deepcopy(model)
    optimizer = build_adamw(model, OptimizerConfig(weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.1)
    update_parameters(optimizer, ONE, NEVER)
    for new, old in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(new, old * 0.95 if old.ndim >= 2 else old)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_are_torchs_clipping_and_unfused_adamw(clip: float) -> None:
    model, reference = small_model(), small_model()
    config = OptimizerConfig(weight_decay=0.1, betas=(0.8, 0.95), clip=clip)
    optimizer = build_adamw(model, config)
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
        norm = AnyOrder(list(model.parameters()), ranks=1).finish()
        set_learning_rate(optimizer, lr)
        update_parameters(optimizer, (norm / clip).clamp(min=1) if clip else ONE, NEVER)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip or math.inf)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        torch.testing.assert_close(norm, expected_norm)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_skipped_update_changes_nothing_and_is_not_counted() -> None:
    model, reference = small_model(), small_model()
    optimizer, undisturbed = (build_adamw(m, OptimizerConfig()) for m in (model, reference))
    for step in range(4):
        fill_gradients(reference, step)
        update_parameters(undisturbed, ONE, NEVER)
        fill_gradients(model, step)
        update_parameters(optimizer, ONE, NEVER)
        fill_gradients(model, 99, size=math.nan)
        update_parameters(optimizer, ONE, torch.tensor(True))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_loss_scale_is_divided_out() -> None:
    model, reference = small_model(), small_model()
    for module, scale in ((model, 1024.0), (reference, 1.0)):
        optimizer = build_adamw(module, OptimizerConfig())
        fill_gradients(module, 0, size=scale)
        update_parameters(optimizer, torch.tensor(scale), NEVER)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)
