"""The Hopper kernels on a Hopper GPU, forced, at their limits: grids that must end, huge tensors, inf and NaN."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.attention.reference import Case, formula, with_part_of_the_mask
from tests.gpu.needs import A_HOPPER_GPU, EACH_SIZE
from tests.gpu.test_hopper import flash, run

pytestmark = A_HOPPER_GPU

# Heads, queries and keys: from one program to four times the n multiprocessors. Rows of 128 n are long enough for the
# forward with three consumers at head size 64.
GRIDS = """
    (1, 64, 64), (1, 129, 129), (n - 1, 128, 128), (n, 128, 128), (n + 1, 192, 192), (4 * n, 128, 128),
    (1, 64, 16384), (n, 200, 16384), (1, 128 * n, 128 * n), (1, 256 * n, 256 * n), (6, 128 * n, 128 * n + 100),
"""


@pytest.mark.parametrize(("D", "dropout"), [(64, 0.0), (64, 0.17), (128, 0.0), (128, 0.17), (256, 0.17)])
def test_grids_of_any_size_end(D, dropout):
    """A time limit ends programs that deadlock."""
    script = f"""
import torch
from attention import AttentionConfig, DropoutKey, KernelPath, Layout, Score, build_attention, documents
attend = build_attention(AttentionConfig("flash", dropout={dropout}, path=KernelPath.hopper))
key = DropoutKey(1, 2, 3, 4)
n = torch.cuda.get_device_properties(0).multi_processor_count
for H, T, S in ({GRIDS}):
    make = lambda length: torch.randn(1, H, length, {D}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = make(T), make(S), make(S)
    starts = torch.arange(S, dtype=torch.int32, device="cuda")[None] // 300 * 300
    for score, layout in ((Score(), Layout()), (Score(window=100), Layout()), (Score(), documents(starts))):
        attend(q, k, v, score=score, layout=layout, dropout_key=key).out.sum().backward()
        torch.cuda.synchronize()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


@EACH_SIZE
def test_a_part_of_heads_queries_and_keys_draws_its_part_of_the_mask(D):
    for got, exact in with_part_of_the_mask(flash(0.5), D, torch.bfloat16, "cuda"):
        assert (got - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@EACH_SIZE
def test_inf_and_nan_reach_the_outputs_that_see_them(D, which, bad):
    """A score of -inf has weight 0 where a row has other scores, and gives 0 / 0 where it has none."""
    tensors = list(Case(1, 1, 1, 150, 150, D).tensors(torch.bfloat16, "cuda"))
    tensors[1][..., 3].abs_()
    tensors[which][0, 0, 140, 3] = bad
    finite = flash()(*tensors[:3]).out[0, 0].isfinite()
    assert torch.equal(finite[140], formula(*(x.float() for x in tensors[:3]))[0, 0, 140].isfinite())
    assert finite[:128].all()  # whose tiles end before


@pytest.mark.parametrize(("B", "T", "S"), [(0, 5, 5), (2, 5, 0), (2, 0, 5)])
def test_empty_inputs_give_empty_or_zero_results(B, T, S):
    q, k = (torch.ones(B, H, n, 64, device="cuda", dtype=torch.bfloat16) for H, n in ((2, T), (1, S)))
    got = run(flash(), q, k, k, q)
    assert [x.shape for x in got] == [q.shape, q.shape, k.shape, k.shape]
    assert not any(x.any() for x in got)
