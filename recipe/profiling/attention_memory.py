"""The memory that one layer's attention allocates, counted tensor by tensor.

A GPU's allocator records the peak of the whole process; the CPU's records nothing. So a dispatch mode watches every
operator: each tensor that it returns counts until the last reference to it is gone.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Attention, AttentionShape, DropoutKey, Layout, Score, documents
from recipe.errors import UserError


class MemoryLimitError(UserError, RuntimeError):
    """A limit that this system does not keep; the message says what to change."""


class AllocationMeter(TorchDispatchMode):
    """While active, `peak` is the most bytes that tensors made since the start have held at once.

    Memory that an operator allocates and frees internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())  # allocated before the start, or already counted
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:  # a view, or an operator that works in place
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, n_bytes: int) -> None:
        self.live -= n_bytes


def forward_backward(attend: Attention, shape: AttentionShape, score: Score, B: int, T: int) -> Callable[[], None]:
    """What runs `attend` forward and backward once over the same B random sequences of T tokens.

    Dropout is as `attend` was configured. Leaves the generators alone.
    """
    generator = torch.Generator(shape.device).manual_seed(0)

    def random(heads: int) -> Tensor:
        x = torch.randn(B, heads, T, shape.head_dim, generator=generator, device=shape.device)
        return x.to(shape.dtype).requires_grad_()

    q, k, v = random(shape.n_heads), random(shape.n_kv_heads), random(shape.n_kv_heads)
    do = torch.ones_like(q)
    sinks = torch.zeros(shape.n_heads, device=shape.device, requires_grad=True) if score.sinks else None
    starts = torch.zeros(B, T, dtype=torch.int32, device=shape.device)
    layout = documents(starts) if shape.documents else Layout()
    key = DropoutKey(seed=0, step=0, layer=0, first_sequence=0)

    def run() -> None:
        with torch.random.fork_rng(devices=[]):
            out = attend(q, k, v, score=score, layout=layout, dropout_key=key, sinks=sinks).out
            torch.autograd.grad(out, (q, k, v), do)

    return run


def attention_peak(attend: Attention, shape: AttentionShape, B: int, T: int) -> int:
    """Bytes that a forward and backward pass of `attend` over B sequences of T tokens takes at its peak, above q, k, v
    and the output's gradient: what it keeps, what it works with, its output and its gradients.

    The score is that of the first layer.
    """
    run, meter = forward_backward(attend, shape, shape.scores[0], B, T), AllocationMeter()
    with meter:
        run()
    return meter.peak


@contextmanager
def cpu_memory_limit(gib: float | None) -> Iterator[None]:
    """Within the block this process runs out of memory at `gib` GiB, as on a GPU of that size, before it takes the
    machine's; None: no limit. An allocation beyond the limit raises RuntimeError.

    Raises MemoryLimitError.
    """
    if gib is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30), hard))
    except (ValueError, OSError) as error:
        raise MemoryLimitError(
            f"training.cpu_memory_gib={gib:g} cannot be set here ({error}); use training.cpu_memory_gib=null."
        ) from error
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
