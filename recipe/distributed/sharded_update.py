"""AdamW's update of a CPU's shards with the bits of an update of whole tensors.

On a CPU, torch's kernel updates a tensor in vectors, and the last elements, too few for a vector, one by one. The two
ways round differently. A shard that ends inside a vector of the whole tensor, such as 4 of a bias's 16 elements, would
so be updated in another way than on one rank.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from recipe.distributed.norm import local, shard_size

# Elements of a vector of fp32.
VECTORS = {"AVX512": 16, "AVX2": 8}


def in_vectors(parameter: Tensor, width: int) -> int:
    """The number of this rank's elements of a sharded tensor that are updated in vectors of so many where it is whole.

    They are the first ones: those after them belong to the whole tensor's last, incomplete vector.
    """
    assert isinstance(parameter, DTensor)
    shape, mesh = parameter.shape, parameter.device_mesh
    start = sum(shard_size(rank, mesh.size(), shape) for rank in range(mesh.get_local_rank()))
    in_whole_vectors = parameter.numel() - parameter.numel() % width
    return min(max(in_whole_vectors - start, 0), local(parameter).numel())


class ShardedAdamW(torch.optim.AdamW):
    """AdamW whose shards have the bits of whole tensors. Shards that end inside a vector are updated in copies."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        """optimizer  of the model's shards: its groups are copied"""
        super().__init__(optimizer.param_groups, fused=True)
        width = VECTORS.get(torch.backends.cpu.get_cpu_capability(), 1)
        shards = [p for group in self.param_groups for p in group["params"]]
        counts = {p: in_vectors(p, width) for p in shards}
        self.width = width
        self.copied = {p: count for p, count in counts.items() if count % width}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update, or none where found_inf is 1."""
        gradients = {p: p.grad for p in self.copied if p.grad is not None}
        for p in gradients:
            p.grad = None
        super().step()
        for p, gradient in gradients.items():
            p.grad = gradient
        for group in self.param_groups:
            self._update_copies(group, [p for p in group["params"] if p in gradients])

    def _update_copies(self, group: dict, parameters: list[nn.Parameter]) -> None:
        """Update shards of a group in copies, of whole vectors and of what is updated one by one."""
        if not parameters:
            return
        pieces: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # weight, gradient and both moments
        steps = []
        for p in parameters:
            state = self.state[p]
            if not state:
                state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            assert p.grad is not None
            flat = [local(x).view(-1) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])]
            divided = [self._divided(x, self.copied[p]) for x in flat]
            pieces += zip(*divided, strict=True)
            # A count of its own for each piece, of which the first is the parameter's.
            steps += [state["step"] if n == 0 else state["step"].clone() for n in range(len(divided[0]))]
        weights, gradients, means, squares = (list(column) for column in zip(*pieces, strict=True))
        beta1, beta2 = group["betas"]
        adamw(
            weights, gradients, means, squares, [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            grad_scale=self.grad_scale, found_inf=self.found_inf,  # type: ignore[attr-defined]
        )  # fmt: skip
        updated = iter(zip(weights, means, squares, strict=True))
        for p in parameters:
            state = self.state[p]
            targets = [local(x).view(-1) for x in (p, state["exp_avg"], state["exp_avg_sq"])]
            for start, end in self._bounds(p):
                for target, piece in zip(targets, next(updated), strict=True):
                    target[start:end] = piece[: end - start]

    def _bounds(self, p: Tensor) -> Iterator[tuple[int, int]]:
        """The ends of a shard's pieces."""
        count, size = self.copied[p], local(p).numel()
        yield 0, count
        if count < size:
            yield count, size

    def _divided(self, x: Tensor, count: int) -> list[Tensor]:
        """Copies of the elements that are updated in vectors, with zeros up to whole ones, and of the others."""
        vectors = torch.nn.functional.pad(x[:count], (0, -count % self.width))
        return [vectors] if count == len(x) else [vectors, x[count:].clone()]


def with_bits_of_wholes(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    """The optimizer or, where it updates shards on a CPU, one like it with the bits of whole tensors.

    With amsgrad or maximize it stays as it is.
    """
    first = next(p for group in optimizer.param_groups for p in group["params"])
    others = any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups)
    return optimizer if others or first.is_cuda or not isinstance(first, DTensor) else ShardedAdamW(optimizer)
