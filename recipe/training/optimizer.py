"""The optimizers, and their learning rate: a pure function of the step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cpu import get_cpu_capability

from model.attention import SelfAttention
from recipe.distributed.norm import local
from recipe.distributed.sharded_update import with_bits_of_wholes
from recipe.distributed.stacks import Stacks
from recipe.errors import UserError

AUTO = "auto"
MOMENTUM = "momentum_buffer"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0, so that few iterations are enough
ITERATIONS, EPS = 5, 1e-7
DECAY_FRACTION = 0.2  # of all steps, in wsd
STACKED = 2**26  # most elements in a stack: the memory of an update does not grow with the model


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
class ScheduleConfig:
    """The options under `schedule.*`.

    name          cosine, wsd (warmup-stable-decay) or constant
    warmup_steps  steps of linear growth from (almost) zero; auto: a tenth of all steps, 100 at most
    min_lr_ratio  final learning rate as a fraction of its peak (cosine, wsd)
    """

    name: str = "cosine"
    warmup_steps: int | str = AUTO
    min_lr_ratio: float = 0.1

    def warmup(self, steps: int) -> int:
        """The number of warm-up steps in a run of `steps`."""
        return min(steps // 10, 100) if self.warmup_steps == AUTO else int(self.warmup_steps)


def cosine(step: int, steps: int, config: ScheduleConfig) -> float:
    """Half a cosine from 1 down to min_lr_ratio: Loshchilov and Hutter 2017, "SGDR", eq. 5, without restarts."""
    warmup = config.warmup(steps)
    progress = (step - warmup) / max(steps - warmup, 1)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def wsd(step: int, steps: int, config: ScheduleConfig) -> float:
    """1, then down over the last fifth as 1 - sqrt: Hägele et al. 2024, "Scaling Laws ... Beyond Fixed Training"."""
    decay_steps = DECAY_FRACTION * steps
    progress = max(step - (steps - decay_steps), 0) / max(decay_steps, 1)
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 - math.sqrt(progress))


def constant(step: int, steps: int, config: ScheduleConfig) -> float:
    """1."""
    return 1.0


SCHEDULES: dict[str, Callable[[int, int, ScheduleConfig], float]] = {f.__name__: f for f in (cosine, wsd, constant)}


def learning_rate(step: int, steps: int, peak: float, config: ScheduleConfig) -> float:
    """The learning rate of the update after `step` of `steps` updates: linear warm-up, then the schedule."""
    warmup = min(1.0, (step + 1) / (config.warmup(steps) + 1))
    return peak * (warmup if warmup < 1 else SCHEDULES[config.name](step, steps, config))


class Muon(torch.optim.Optimizer):
    """Muon for some matrices and torch's fused AdamW for the rest, as one optimizer.

        M = mu M + (1 - mu) G                     the momentum of a matrix's gradient
        O = orthogonal(mu M + (1 - mu) G)         its singular values brought near 1, by five Newton-Schulz iterations
        W = (1 - lr decay) W - 0.2 sqrt(max(rows, columns)) lr O

    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". The factor of Liu et al. 2025, "Muon
    is Scalable for LLM Training", makes an update as large as AdamW's usually is, so learning rate and decay can be
    AdamW's. The fused projection to queries, keys and values is three matrices, which are orthogonalised separately.
    Matrices of one shape are orthogonalised together, as `torch.optim.Muon` does it for one: a GPU has too little work
    in the products of a small model's matrices one by one. Ranks that shard the matrices also divide these stacks among
    them (stacks.py).

    Like the fused AdamW it reads two numbers on the device: it divides gradients by `grad_scale`, and changes nothing
    where `found_inf` is 1.
    """

    _step_supports_amp_scaling = True  # torch's name for it
    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        matrices: Sequence[tuple[Tensor, Sequence[int]]],
        options: dict[str, Any],
        momentum: float,
        adamw: torch.optim.AdamW,
    ) -> None:
        """
        matrices  whole or sharded by rows, each with the row counts of the parts that are orthogonalised separately
        options   {"lr": a tensor on the matrices' device, "weight_decay"}
        adamw     of all other parameters
        """
        self.adamw, self.momentum, self.matrices = adamw, momentum, [matrix for matrix, _ in matrices]
        super().__init__([{"params": self.matrices, **options}, *adamw.param_groups], {})
        adamw.state = self.state
        self.stacks = Stacks(matrices, STACKED)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none where found_inf is 1."""
        skip, group = self.found_inf.bool(), self.param_groups[0]
        weights = [local(matrix) for matrix in self.matrices]
        averages = [local(self.average(matrix)) for matrix in self.matrices]
        # The mean of the momentum and itself is itself, bit for bit.
        gradients = [local(matrix.grad) for matrix in self.matrices if matrix.grad is not None]
        torch._foreach_div_(gradients, self.grad_scale)
        for i, (matrix, average) in enumerate(zip(self.matrices, averages, strict=True)):
            gradients[i] = torch.where(skip, average, gradients[i])
            matrix.grad = None
        torch._foreach_lerp_(averages, gradients, 1 - self.momentum)
        torch._foreach_lerp_(gradients, averages, self.momentum)
        lr = torch.where(skip, 0.0, group["lr"])
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        parts, ahead = self.stacks.parts(weights), self.stacks.parts(gradients)
        for stack, result in self.stacks.apply(orthogonal, ahead, torch.bfloat16):
            size = max(self.stacks.shapes[stack[0]])
            factor = (lr * (-0.2 * math.sqrt(size))).reshape(1)  # whose fp32 a number without dimensions would lose
            updates = torch.empty(result.shape, dtype=torch.float32, device=lr.device)
            torch.mul(result, factor, out=updates)
            targets = [parts[i] for i in stack]
            flat = updates.view(-1).split([x.numel() for x in targets])
            torch._foreach_add_(targets, [x.view_as(y) for x, y in zip(flat, targets, strict=True)])
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()

    def average(self, matrix: Tensor) -> Tensor:
        """The momentum of a matrix, which begins at zero."""
        if MOMENTUM not in self.state[matrix]:
            self.state[matrix][MOMENTUM] = torch.zeros_like(matrix)
        return self.state[matrix][MOMENTUM]


def orthogonal(x: Tensor) -> Tensor:
    """The matrices x (n, rows, columns), in bf16, with their singular values brought near 1.

    X = a X + (b A + c A^2) X with A = X X^T, from X / |X| on. Where a CPU has no instructions for bf16, fp32 computes
    the products and their results are rounded: torch's own products took 28 times as long.
    """
    a, b, c = COEFFICIENTS
    has_bf16 = x.is_cuda or get_cpu_capability().startswith("AVX512")
    rounded = Tensor.bfloat16 if has_bf16 else lambda y: y.bfloat16().float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = rounded(x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS))
    for _ in range(ITERATIONS):
        products = rounded(x @ x.mT)
        polynomial = rounded(torch.baddbmm(products, products, products, beta=b, alpha=c))
        x = rounded(torch.baddbmm(x, polynomial, x, beta=a))
    return (x.mT if tall else x).bfloat16()


def hidden_matrices(model: nn.Module) -> list[tuple[Tensor, list[int]]]:
    """The weights of the linear layers but the head, each with the row counts of the matrices in it."""
    attentions = [m for m in model.modules() if isinstance(m, SelfAttention)]
    fused: dict[nn.Module, list[int]] = {
        m.c_attn: [n * m.head_dim for n in (m.n_heads, m.n_kv_heads, m.n_kv_heads)] for m in attentions
    }
    head = getattr(model, "lm_head", None)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return [(m.weight, fused.get(m, [len(m.weight)])) for m in linear if m.weight.requires_grad]


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
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), fused=True, capturable=parameters[0].is_cuda)


# docs/add-an-optimizer.md lists the requirements of an optimizer.
OPTIMIZERS: dict[str, Callable[[nn.Module, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": build_adamw,
    "muon": build_muon,
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters. Raises UserError where it would ignore part of the training."""
    optimizer = OPTIMIZERS[config.name](model, config)
    check_optimizer(optimizer, model, config.name)
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """Raise UserError for an optimizer that breaks a promise of docs/add-an-optimizer.md."""
    kind = f"optimizer={name} ({type(optimizer).__name__})"
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    left_out = [name for name, p in model.named_parameters() if p.requires_grad and not any(p is q for q in updated)]
    if left_out:
        raise UserError(f"{kind} does not update {left_out[0]}; give it every parameter that requires_grad.")
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise UserError(
            f"{kind} does not say that it divides gradients by grad_scale and leaves out a step by found_inf, so "
            "optimizer.clip and the loss scale would have no effect; build it with fused=True, or see "
            "docs/add-an-optimizer.md."
        )
    if not all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        raise UserError(
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
    for option, name, choices in (("optimizer", config.name, OPTIMIZERS), ("schedule", schedule.name, SCHEDULES)):
        if name not in choices:
            yield f"{option}.name={name} is not known; choose one of {', '.join(choices)}."
    if not (len(config.betas) == 2 and all(0 <= beta < 1 for beta in config.betas)):
        yield f"optimizer.betas={list(config.betas)} must be two numbers in [0, 1), such as [0.9,0.99]."
    for name, lr in {"lr": config.lr, "muon_lr": config.muon_lr}.items():
        if lr is not None and not (lr > 0 and math.isfinite(lr)):
            yield f"optimizer.{name}={lr} must be above 0 and finite, such as optimizer.{name}=1e-3."
    if not 0 <= config.momentum < 1:
        yield f"optimizer.momentum={config.momentum} must lie in [0, 1), such as 0.95."
    for name in ("momentum", "muon_lr"):
        if config.name == "adamw" and getattr(config, name) != getattr(OptimizerConfig, name):
            yield f"optimizer.{name}={getattr(config, name)} has no effect with optimizer=adamw; choose optimizer=muon."
    for name in ("weight_decay", "clip"):
        if not getattr(config, name) >= 0:
            yield f"optimizer.{name}={getattr(config, name)} must not be negative; optimizer.{name}=0 turns it off."
    warmup = schedule.warmup_steps
    if warmup != AUTO and not (isinstance(warmup, int) and 0 <= warmup <= steps):
        yield (
            f"schedule.warmup_steps={warmup} must be a whole number between 0 and training.steps={steps}; "
            f"use schedule.warmup_steps={AUTO}."
        )
    if not 0 <= schedule.min_lr_ratio <= 1:
        yield f"schedule.min_lr_ratio={schedule.min_lr_ratio} must lie between 0 and 1."
