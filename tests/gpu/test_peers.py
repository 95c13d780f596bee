"""attention=varlen, where torch has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention import Attention, AttentionConfig, AttentionShape, UnsupportedAttention, build_attention
from attention.check.cases import Case
from attention.check.results import verdicts
from attention.check.subject import ours

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CUDA = torch.device("cuda")
CASES = {
    "causal": Case(T=515, S=515, D=64, B=2, H=4, H_kv=2),
    "full": Case(T=129, S=300, D=128, causal=False),
    "fewer queries": Case(T=100, S=300, D=64, scale=0.3),
    "more queries": Case(T=300, S=100, D=64),
    "window": Case(T=300, S=300, D=64, B=2, window=70),
    "documents": Case(T=300, S=300, D=64, B=2, documents=(3, 200, 97)),
    "soft cap": Case(T=300, S=300, D=64, soft_cap=2.0, spread=3.0),
    "sinks": Case(T=300, S=300, D=64, H=4, H_kv=2, sinks=True),
}


def varlen() -> Attention:
    """Skipped where torch lacks it."""
    try:
        return build_attention(AttentionConfig("varlen"))
    except UnsupportedAttention as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_varlen_computes_the_formula_and_its_gradients(case: Case):
    subject = ours("varlen", "", "varlen", varlen(), frozenset())
    if not subject.supports(case):
        pytest.skip(f"varlen lacks {case.features() - subject.features}")
    for found in verdicts(subject, replace(case, dtype="fp16" if case.window else "bf16"), CUDA):
        assert found.passes, found


def test_a_shape_that_the_kernels_do_not_support_is_refused_before_training():
    attend = varlen()
    attend.check(AttentionShape(64, 4, 2, torch.bfloat16, CUDA, documents=True, training=True))
    with pytest.raises(UnsupportedAttention, match="takes bf16 or fp16"):
        attend.check(AttentionShape(64, 4, 2, torch.float32, CUDA))
