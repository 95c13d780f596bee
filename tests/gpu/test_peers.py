"""attention=varlen, where torch has it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention import Attention, AttentionConfig, AttentionShape, UnsupportedAttention, build_attention
from attention.check.subject import ours
from tests.attention.subjects import assert_judged_right
from tests.attention.test_peers import CASES, CUDA


def varlen() -> Attention:
    """Skipped where torch lacks it."""
    try:
        return build_attention(AttentionConfig("varlen"))
    except UnsupportedAttention as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_varlen_computes_the_formula_and_its_gradients(case):
    """Of cases nine times as long as on a CPU."""
    lengths: dict[str, Any] = {"T": 9 * case.T, "S": 9 * case.S, "documents": tuple(9 * n for n in case.documents)}
    case = replace(case, **lengths, D=64, memory="contiguous", dtype="fp16" if case.window else "bf16")
    subject = ours("varlen", "", "varlen", varlen(), frozenset())
    if not subject.supports(case):
        pytest.skip(f"varlen lacks {case.features() - subject.features}")
    assert_judged_right(subject, case, "cuda")


def test_a_shape_that_the_kernels_do_not_support_is_refused_before_training():
    attend = varlen()
    attend.check(AttentionShape(64, 4, 2, torch.bfloat16, CUDA, documents=True, training=True))
    with pytest.raises(UnsupportedAttention, match="takes bf16 or fp16"):
        attend.check(AttentionShape(64, 4, 2, torch.float32, CUDA))
