"""Flash-decoding in plain PyTorch: the algorithm to read together with the Triton kernels.

The new queries of a sequence are few and its keys many, so the keys are cut into tiles of block_k, each with a separate
softmax. A tile leaves only m, l and o: its maximum, and its sums of exp(s - m) and of exp(s - m) v. Two such triples
combine into one in any order, by their log-sum-exp m + log(l). On a GPU different programs have different tiles; here
they come one after the other.

    Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..formula.call import tile_formula
from ..gpu import NAMESPACE
from ..layout import Layout
from ..precision import accum_dtype
from ..score import key_intervals
from ..scores.sinks import start_with_sinks
from ..spec import Inputs, Spec
from .cache import Cache, host_sees


@torch.library.custom_op(f"{NAMESPACE}::tiled_decode", mutates_args=())
def decode(q: Tensor, cache: Sequence[Tensor | None], inputs: Sequence[Tensor], spec: str) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) against a Cache to out (B, H, T, D) and lse (B, H, T).

    cache   k, v, lengths and pages, as Cache has them
    inputs  the tensors of the score's formula as `prepare` gives them, and sinks (H,), where the score has them
    spec    the text of a Spec

    One operation for torch.compile: unrolled, the loop would be a graph of thousands.
    """
    kept = Cache(*cache)  # type: ignore[arg-type]
    k, v, lengths, _ = kept
    known, layout = Spec.read(spec), Layout(lengths=lengths)
    score, scale, block_k = known.score, known.scale, known.block_k
    given = Inputs.of(known, inputs)
    H, T, H_kv, S = q.shape[1], q.shape[2], k.shape[1], kept.longest()
    dtype = accum_dtype(q.dtype)
    b_q = q.unflatten(1, (H_kv, H // H_kv)).to(dtype)  # (B, H_kv, G, T, D)
    seen = key_intervals(score, layout, T, S, q.device)
    formula = tile_formula(score, layout, given.formula or (), T, S, q.device)
    # The maximum starts at the lowest finite number, not at -inf, so that rows that see nothing compute
    # exp(-inf - m) = 0 and never a NaN.
    m = torch.full_like(b_q[..., :1], torch.finfo(dtype).min)
    l = torch.zeros_like(m)
    start_with_sinks(m, l, given.sinks)
    o = torch.zeros_like(b_q)

    for start in range(0, S, block_k):
        columns = (start, min(start + block_k, S))
        if host_sees(lengths) and not seen.meet((0, T), columns):
            continue
        b_k, b_v = (x.unsqueeze(2).to(dtype) for x in kept.read(*columns))  # (B, H_kv, 1, block_k, D)
        b_s = scale * (b_q @ b_k.mT)
        if formula is not None:
            b_s = formula.value(b_s.flatten(1, 2), (0, T), columns).view(b_s.shape)
        mask = seen.mask((0, T), columns)
        if mask is not None:
            b_s = b_s.masked_fill(~mask.unsqueeze(1), -torch.inf)
        m_new = torch.maximum(m, b_s.amax(dim=-1, keepdim=True))
        alpha = torch.exp(m - m_new)
        b_p = torch.exp(b_s - m_new)
        l = alpha * l + b_p.sum(dim=-1, keepdim=True)
        o = alpha * o + b_p.to(v.dtype).to(dtype) @ b_v
        m = m_new

    out = (o / l).masked_fill(seen.fully_masked((0, T)).unsqueeze(1), 0.0)
    lse = m + torch.log(l)
    return out.to(q.dtype).flatten(1, 2), lse.squeeze(-1).flatten(1, 2)


@decode.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=accum_dtype(q.dtype))
