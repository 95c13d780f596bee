"""The optimizers, and their learning rate: a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recipe.distributed.sharded_update import with_bits_of_wholes
from recipe.errors import UserError
from recipe.training.muon import Muon, hidden_matrices

AUTO = "auto"


class OptimizerError(UserError, ValueError):
    """An optimizer that would ignore part of the training; the message says what to change."""


@dataclass
class OptimizerConfig:
    """The options under `optimizer.*`.

    name          adamw, or muon for the matrices of the hidden layers and AdamW for the rest
    lr            the peak of the schedule
    weight_decay  times the learning rate, of matrices and embeddings
    betas         decay of the running means of the gradient and of its square
    clip          largest norm of all gradients; 0: no clipping
    momentum      decay of Muon's momentum
    muon_lr       the peak for Muon's matrices; None: lr
    """

    name: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    clip: float = 1.0
    momentum: float = 0.95
    muon_lr: float | None = None


@dataclass
class Decay:
    """The option `schedule.decay`.

    to        the last learning rate, as a fraction of its peak (cosine, wsd)
    fraction  of all steps, for the final decay (wsd)
    """

    to: float = 0.1
    fraction: float = 0.2


@dataclass
class ScheduleConfig:
    """The options under `schedule.*`.

    name          cosine, wsd (warmup-stable-decay) or constant
    warmup_steps  steps of linear growth from (almost) zero; auto: a tenth of all steps, 100 at most
    decay         how the learning rate falls
    """

    name: str = "cosine"
    warmup_steps: int | str = AUTO
    decay: Decay = field(default_factory=Decay)

    def warmup(self, steps: int) -> int:
        """The number of warm-up steps in a run of `steps`."""
        return min(steps // 10, 100) if self.warmup_steps == AUTO else int(self.warmup_steps)


def cosine(step: int, steps: int, config: ScheduleConfig) -> float:
    """Half a cosine from 1 down to decay.to: Loshchilov and Hutter 2017, "SGDR", eq. 5, without restarts."""
    warmup = config.warmup(steps)
    progress = (step - warmup) / max(steps - warmup, 1)
    return config.decay.to + (1 - config.decay.to) * (1 + math.cos(math.pi * progress)) / 2


def wsd(step: int, steps: int, config: ScheduleConfig) -> float:
    """1, then down over the last steps as 1 - sqrt: Hägele et al. 2024, "Scaling Laws ... Beyond Fixed Training"."""
    decay_steps = config.decay.fraction * steps
    progress = max(step - (steps - decay_steps), 0) / max(decay_steps, 1)
    return config.decay.to + (1 - config.decay.to) * (1 - math.sqrt(progress))


def constant(step: int, steps: int, config: ScheduleConfig) -> float:
    """1."""
    return 1.0


SCHEDULES: dict[str, Callable[[int, int, ScheduleConfig], float]] = {f.__name__: f for f in (cosine, wsd, constant)}


def learning_rate(step: int, steps: int, peak: float, config: ScheduleConfig) -> float:
    """The learning rate of the update after `step` of `steps` updates: linear warm-up, then the schedule."""
    warmup = min(1.0, (step + 1) / (config.warmup(steps) + 1))
    return peak * (warmup if warmup < 1 else SCHEDULES[config.name](step, steps, config))


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) that decays matrices and embeddings, not biases and norms.

    The learning rate is a tensor on the parameters' device, filled before each step. A new value then needs neither
    recompilation nor a new CUDA graph.
    """
    return adamw_of([p for p in model.parameters() if p.requires_grad], config)


def build_muon(model: nn.Module, config: OptimizerConfig) -> Muon:
    """Muon for the weights of linear layers, AdamW for embeddings, the head tied to them, norms and biases."""
    matrices = hidden_matrices(model)
    hidden = {matrix for matrix, _ in matrices}
    adamw = adamw_of([p for p in model.parameters() if p.requires_grad and p not in hidden], config)
    options = {
        "lr": adamw.param_groups[0]["lr"].clone(),
        "lr_ratio": 1.0 if config.muon_lr is None else config.muon_lr / config.lr,
        "weight_decay": config.weight_decay,
    }
    return Muon(matrices, options, config.momentum, with_bits_of_wholes(adamw))


def adamw_of(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW for some parameters of one device."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr = torch.tensor(config.lr, device=parameters[0].device)
    beta1, beta2 = config.betas
    on_gpu = parameters[0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), fused=True, capturable=on_gpu)


# docs/add-an-optimizer.md lists the requirements of an optimizer.
OPTIMIZERS: dict[str, Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": build_adamw,
    "muon": build_muon,
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters. Raises OptimizerError where it would ignore part of the training."""
    optimizer = OPTIMIZERS[config.name](model, config)
    check_optimizer(optimizer, model, config.name)
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """Raise OptimizerError for an optimizer that breaks a promise of docs/add-an-optimizer.md."""
    kind = f"optimizer={name} ({type(optimizer).__name__})"
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and not any(p is q for q in updated)]
    if left_out:
        raise OptimizerError(f"{kind} does not update {left_out[0]}; give it every parameter that requires_grad.")
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise OptimizerError(
            f"{kind} does not say that it divides gradients by grad_scale and leaves out a step by found_inf, so "
            "optimizer.clip and the loss scale would have no effect; build it with fused=True, or see "
            "docs/add-an-optimizer.md."
        )
    if not all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        raise OptimizerError(
            f"{kind} has a learning rate that is no tensor, so schedule=... would have no effect; build it with "
            "lr=torch.tensor(config.lr), on the parameters' device."
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update, in the tensor that the device reads."""
    for group in optimizer.param_groups:
        group["lr"].fill_(lr * group.get("lr_ratio", 1.0))


def update_parameters(optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
    """One update from gradients / divisor, or none if `skip`. The device decides; the host does not wait.

    divisor  0-dim: scaling and clipping in one
    skip     0-dim bool: leave weights, moments and their step count as they are
    """
    # The fused kernel divides by `grad_scale` as it reads the gradients, and returns at once where `found_inf` is 1:
    # clipping and skipping need no extra pass over the gradients.
    optimizer.grad_scale, optimizer.found_inf = divisor, skip.float()  # type: ignore[attr-defined]
    optimizer.step()


def optimizer_mistakes(config: OptimizerConfig, schedule: ScheduleConfig, steps: int) -> Iterator[str]:
    """A sentence for each hyperparameter that cannot train, with the change that helps."""
    if config.name not in OPTIMIZERS:
        yield f"optimizer.name={config.name} is not known; choose one of {', '.join(OPTIMIZERS)}."
    if schedule.name not in SCHEDULES:
        yield f"schedule.name={schedule.name} is not known; choose one of {', '.join(SCHEDULES)}."
    if not (len(config.betas) == 2 and all(0 <= beta < 1 for beta in config.betas)):
        yield f"optimizer.betas={list(config.betas)} must be two numbers in [0, 1), such as [0.9,0.99]."
    if not (config.lr > 0 and math.isfinite(config.lr)):
        yield f"optimizer.lr={config.lr} must be above 0 and finite, such as optimizer.lr=1e-3."
    if not 0 <= config.momentum < 1:
        yield f"optimizer.momentum={config.momentum} must lie in [0, 1), such as 0.95."
    if config.muon_lr is not None and not (config.muon_lr > 0 and math.isfinite(config.muon_lr)):
        yield f"optimizer.muon_lr={config.muon_lr} must be above 0 and finite, or null for optimizer.lr."
    for name in ("momentum", "muon_lr"):
        if config.name == "adamw" and getattr(config, name) != getattr(OptimizerConfig, name):
            yield f"optimizer.{name}={getattr(config, name)} has no effect with optimizer=adamw; choose optimizer=muon."
    for name in ("weight_decay", "clip"):
        if not getattr(config, name) >= 0:
            yield f"optimizer.{name}={getattr(config, name)} must not be negative; optimizer.{name}=0 turns it off."
    if isinstance(schedule.warmup_steps, str) and schedule.warmup_steps != AUTO:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} is not a whole number or auto; "
            f"use schedule.warmup_steps={AUTO}."
        )
    elif isinstance(schedule.warmup_steps, int) and not 0 <= schedule.warmup_steps <= steps:
        yield (
            f"schedule.warmup_steps={schedule.warmup_steps} must lie between 0 and training.steps={steps}; "
            f"use schedule.warmup_steps={AUTO}."
        )
    for name, value in vars(schedule.decay).items():
        if not 0 <= value <= 1:
            yield f"schedule.decay.{name}={value} must lie between 0 and 1."
