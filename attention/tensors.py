"""The tensors of a call: their required shapes, and the defaults of a score's tensors."""

from typing import Any

import torch
from torch import Tensor

from .layout import Layout
from .score import Score


def score_tensors(score: Score, named: dict[str, Any], q: Tensor) -> dict[str, Tensor]:
    """The tensors of a score, by name, with defaults for the ones that the caller left out. Raises ValueError.

    `prepare` checks the shapes of a formula's tensors.
    """
    if not named and not score.head_tensors:
        return {}
    named = (named.pop("tensors", None) or {}) | named
    H, axes, of_options = q.shape[1], score.tensors(), score.head_tensors
    tensors, of_heads = {name: x for name, x in named.items() if x is not None}, [x.name for x in of_options]
    for name, x in tensors.items():
        if name not in axes or (name in of_heads and x.shape != (H,)):
            fits = f"one for each of {H} query heads" if name in axes else f"{score} has none"
            raise ValueError(f"{name} of shape {tuple(x.shape)} do not fit: {fits}.")
    for name, initial, learned in of_options:
        if name not in tensors:
            if learned:
                raise ValueError(f"{score} needs {name}, (H,): one for each of {H} query heads.")
            tensors[name] = initial(H, q.device)
    return tensors


def version(x: Tensor | None) -> object:
    """Differs once x has changed in place; under inference_mode, whose tensors count no changes, at each call."""
    if x is None:
        return None
    return object() if torch.is_inference_mode_enabled() or x.is_inference() else x._version


def check_inputs(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """Raise ValueError unless the tensors of a call have the shapes that `Attention.__call__` describes."""
    of_q, of_k = q.shape, k.shape
    if len(of_q) != 4 or len(of_k) != 4 or of_k != v.shape:
        raise ValueError(
            f"attention takes q (B, H, T, D) and k, v (B, H_kv, S, D); got {tuple(of_q)}, {tuple(of_k)}, "
            f"{tuple(v.shape)}."
        )
    (B, H, T, D), (sequences, H_kv, S, head_dim) = of_q, of_k
    if sequences != B or head_dim != D:
        raise ValueError(f"q {tuple(of_q)} and k {tuple(of_k)} must agree in batch and head size.")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"{H} query heads are not a multiple of {H_kv} key/value heads.")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.is_floating_point()):
        raise ValueError(f"q, k, v must share a floating dtype and a device; got {q.dtype}, {k.dtype}, {v.dtype}.")
    starts, ends = layout.document_starts, layout.document_ends
    if starts is not None or ends is not None:
        last = max(layout.query_start(T, S) + T, layout.k_start + S)
        for x in (starts, ends):
            if x is None or x.ndim != 2 or x.shape[0] != B or x.shape[1] < last or x.is_floating_point():
                raise ValueError(
                    f"document_starts and document_ends must be integers of shape ({B}, {last} or more); got "
                    f"{None if x is None else (tuple(x.shape), x.dtype)}."
                )
