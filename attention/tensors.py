"""The tensors of a call: their required shapes, and the defaults of a score's tensors."""

from typing import Any

from torch import Tensor

from .layout import Layout
from .score import Score


def score_tensors(score: Score, named: dict[str, Any], q: Tensor) -> dict[str, Tensor]:
    """The tensors of a score, by name, with defaults for the ones that the caller left out. Raises ValueError.

    `prepare` checks the shapes of a formula's tensors.
    """
    named = (named.pop("tensors", None) or {}) | named
    H, axes, of_options = q.shape[1], score.tensors(), score.head_tensors
    tensors, of_heads = {name: x for name, x in named.items() if x is not None}, [x.name for x in of_options]
    for name, x in tensors.items():
        if name not in axes or (name in of_heads and x.shape != (H,)):
            fits = f"one for each of {H} query heads" if name in axes else f"{score} has none"
            raise ValueError(f"{name} of shape {tuple(x.shape)} do not fit: {fits}.")
    for name, initial, learned in of_options:
        if name not in tensors and learned:
            raise ValueError(f"{score} needs {name}, (H,): one for each of {H} query heads.")
        if name not in tensors:
            tensors[name] = initial(H, q.device)
    return tensors


def check_inputs(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Raise ValueError unless the tensors of a call have the shapes that `Attention.__call__` describes."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"attention takes q (B, H, T, D) and k, v (B, H_kv, S, D); got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}."
        )
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch and head size.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(f"q, k, v must share dtype and device; got {q.dtype}, {k.dtype}, {v.dtype}.")
    starts, ends = layout.document_starts, layout.document_ends
    if starts is not None or ends is not None:
        last = max(layout.query_start(q.shape[2], k.shape[2]) + q.shape[2], layout.k_start + k.shape[2])
        for x in (starts, ends):
            if x is None or x.ndim != 2 or x.shape[0] != q.shape[0] or x.shape[1] < last or x.is_floating_point():
                raise ValueError(
                    f"document_starts and document_ends must be integers of shape ({q.shape[0]}, {last} or more); got "
                    f"{None if x is None else (tuple(x.shape), x.dtype)}."
                )
