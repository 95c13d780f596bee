"""Several sequences in one row through the Hopper kernels on a Hopper GPU, forced: prefill in one call, and cuts."""

import pytest
import torch

from tests.attention.reference import Case, assert_cut_is_accurate, assert_packed_is_accurate
from tests.gpu.needs import A_HOPPER_GPU, EACH_SIZE
from tests.gpu.test_hopper import flash

pytestmark = A_HOPPER_GPU

LENGTHS = (300, 1, 0, 129, 64, 511, 1)
CUTS = (((0, 260), (0, 260)), ((260, 700), (100, 700)), ((333, 470), (180, 700)), ((499, 530), (333, 560)))


@EACH_SIZE
@pytest.mark.parametrize("changed", [{}, {"causal": False}, {"window": 100}], ids=str)
def test_sequences_of_any_length_prefill_in_one_call(changed, D):
    case = Case(1, 4, 2, sum(LENGTHS), sum(LENGTHS), D, documents=LENGTHS, **changed)
    assert_packed_is_accurate(flash(), case, torch.bfloat16, "cuda")


@EACH_SIZE
@pytest.mark.parametrize(
    "changed", [{}, {"soft_cap": 3.0, "alibi": True, "sinks": True}], ids=["documents", "everything"]
)
def test_a_cut_of_the_queries_with_a_cut_of_the_keys_is_a_cut_of_the_whole(changed, D):
    """The keys of a cut include all that its queries see through the window."""
    case = Case(2, 4, 2, 700, 700, D, window=150, documents=(200, 1, 300, 199), **changed)
    for rows, columns in CUTS:
        assert_cut_is_accurate(flash(), case, rows, columns, torch.bfloat16, "cuda")
