"""Several sequences in one row through the Hopper kernels on a Hopper GPU, forced: prefill in one call, and cuts."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attention import Score, varlen
from tests.attention.reference import Case, Expected, assert_as_accurate, formula, gradients
from tests.gpu.test_hopper import flash

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

BOUNDS = (0, *accumulate((300, 1, 0, 129, 64, 511, 1)))
CUTS = (((0, 260), (0, 260)), ((260, 700), (100, 700)), ((333, 470), (180, 700)), ((499, 530), (333, 560)))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("score", [Score(), Score(causal=False), Score(window=100)], ids=str)
def test_sequences_of_any_length_prefill_in_one_call(score, D):
    """As one call for each: of `total` tokens with heads and channels each, and the bounds of the sequences."""
    H, H_kv, total = 4, 2, BOUNDS[-1]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(total, heads, D, generator=generator).to("cuda", torch.bfloat16) for heads in (H, H_kv, H_kv, H)
    ]

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for first, end in pairwise(BOUNDS):
            case = Case(1, H, H_kv, end - first, end - first, D, causal=score.causal, window=score.window)
            outs.append(formula(*(x[first:end].transpose(0, 1)[None] for x in (q, k, v)), case=case))
        return torch.cat(outs, dim=2)[0].transpose(0, 1)

    expected = Expected(gradients(alone, *(x.double() for x in tensors)), gradients(alone, *tensors))
    got = gradients(partial(varlen, flash(), cu_seqlens=torch.tensor(BOUNDS), score=score), *tensors)
    assert_as_accurate(got, expected, 3.0, f"{score}, {D}")


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    "changed", [{}, {"soft_cap": 3.0, "alibi": True, "sinks": True}], ids=["documents", "everything"]
)
def test_a_cut_of_the_queries_with_a_cut_of_the_keys_is_a_cut_of_the_whole(changed, D):
    """The keys of a cut include all that its queries see through the window."""
    case = Case(2, 4, 2, 700, 700, D, window=150, documents=(200, 1, 300, 199), **changed)
    tensors, sinks = case.tensors(torch.bfloat16, "cuda"), case.sink_logits("cuda")
    for rows, columns in CUTS:
        queries, keys = (slice(None), slice(None), slice(*rows)), (slice(None), slice(None), slice(*columns))
        parts = {"out": (...,), "dq": queries, "dk": keys, "dv": keys}

        def whole(q: Tensor, k: Tensor, v: Tensor, queries: Any = queries) -> Tensor:
            return formula(q, k, v, sinks, case=case)[queries]

        layout = case.layout("cuda")._replace(q_start=rows[0], k_start=columns[0])
        attend = partial(flash(), score=case.score, layout=layout, sinks=sinks)
        q, k, v, do = (x[part] for x, part in zip(tensors, (queries, keys, keys, queries), strict=True))
        exact, plain = (
            {name: x[parts[name]] for name, x in gradients(whole, *(y.to(dtype) for y in (*tensors[:3], do))).items()}
            for dtype in (torch.float64, torch.bfloat16)
        )
        got = gradients(attend, q, k, v, do)
        assert_as_accurate(got, Expected(exact, plain), 3.0, f"queries {rows}, keys {columns}, {case}")
