"""The state of a training run between two steps: a moving average of the weights, and named tensors for checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from recipe.distributed.norm import local
from recipe.distributed.shared_update import SharedAdamW
from recipe.training.checkpoint import load_checkpoint
from recipe.training.checkpoint_files import Tensors

MOMENTS = "moments."
AVERAGE = "average."  # of the weights


class MovingAverage:
    """An exponential moving average of a model's weights, sharded as they are:

        A = d A + (1 - d) W,     d = min(decay, (1 + n) / (10 + n)) after n updates

    The smaller decay of the first updates keeps the initial weights from staying in the average for long.

    weights  of the average, by the names of the model's parameters
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.parameters = dict(model.named_parameters())
        self.weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current weights."""
        for name, parameter in self.parameters.items():
            self.weights[name].copy_(parameter)

    @torch.no_grad()
    def update(self, updates: Tensor, skip: Tensor) -> None:
        """Add the weights after one more update. The device decides; the host does not wait.

        updates  0-dim: the number of updates before this one
        skip     0-dim bool: the update was not taken, and the average stays as it is
        """
        share = torch.where(skip, 0.0, 1 - ((1 + updates) / (10 + updates)).clamp(max=self.decay))
        for name, parameter in self.parameters.items():
            local(self.weights[name]).lerp_(local(parameter), share)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block the model computes with the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            live, average = local(parameter), local(self.weights[name])
            before = live.clone()
            live.copy_(average)
            average.copy_(before)


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer, others: Tensors) -> dict[str, Tensors]:
    """{"model": weights, "training": moments.<parameter>.<slot> and `others`}: the tensors themselves, no copies."""
    moments = {
        f"{MOMENTS}{name}.{slot}": value
        for name, parameter in updated_by(optimizer, model).items()
        for slot, value in optimizer.state[parameter].items()
    }
    return {"model": dict(model.state_dict()), "training": {**moments, **others}}


@torch.no_grad()
def restore_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, others: Tensors) -> bool:
    """Fill weights, moments and `others` from a checkpoint. Hyperparameters stay the optimizer's.

    Every rank calls this; the number of ranks may differ from the number that wrote it. Returns whether the checkpoint
    has an average of the weights, which is ignored if `others` has none. Raises CheckpointError.
    """
    parameters, updated = dict(model.named_parameters()), updated_by(optimizer, model)
    device = next(iter(updated.values())).device

    def owner(name: str) -> nn.Parameter:
        """The parameter that a moment belongs to."""
        return updated[name.removeprefix(MOMENTS).rpartition(".")[0]]

    def allocate(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """An empty tensor, sharded like its parameter."""
        like = owner(name) if name.startswith(MOMENTS) else parameters.get(name.removeprefix(AVERAGE))
        if like is not None and like.shape == size:
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(size, dtype=dtype, device=device)

    loaded = load_checkpoint(path, allocate)
    model.load_state_dict(loaded["model"])
    optimizer.state.clear()
    for name, value in loaded["training"].items():
        if name.startswith(MOMENTS):
            optimizer.state[owner(name)][name.rpartition(".")[2]] = value
        elif name in others or not name.startswith(AVERAGE):
            others[name].copy_(value)
    return any(name.startswith(AVERAGE) for name in loaded["training"])


def updated_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensor that the optimizer updates for each trained parameter of the model, by the parameter's name."""
    shards = optimizer.shards if isinstance(optimizer, SharedAdamW) else {}
    return {
        name: shards.get(parameter, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
