"""learn/flash.py: right results, and the traffic that the papers' theorem states."""

import itertools
import math

import pytest
import torch

from learn.flash import block_sizes
from learn.page import count_traffic
from learn.problem import FORWARD, Problem, solve

PROBLEMS = [
    Problem(),
    Problem(causal=True),
    Problem(causal=True, window=2),
    Problem(dropout=0.25),
    Problem(N=9, d=4, M=40, causal=True, window=3, dropout=0.1),
]


@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_and_backward_are_those_of_the_formula(problem, algorithm):
    q, k, v, do = (x.double() for x in problem.inputs())
    for x in (q, k, v):
        x.requires_grad_()
    scores = (q @ k.T / math.sqrt(problem.d)).masked_fill(~problem.visible(), -torch.inf)
    out = (scores.softmax(dim=1) * problem.dropout_factors().double()) @ v
    gradients = torch.autograd.grad(out, (q, k, v), do)
    assert torch.allclose(solve(problem, algorithm)["O"].double(), out, atol=1e-6)
    backward = solve(problem, algorithm, backward=True)
    for name, gradient in zip(("dQ", "dK", "dV"), gradients, strict=True):
        assert torch.allclose(backward[name].double(), gradient, atol=1e-6), name


def test_the_texts_example_gives_its_tile_sizes():
    assert block_sizes(d=3, M=59) == (3, 4)
    with pytest.raises(ValueError, match="use M=12 or more"):
        block_sizes(d=3, M=11)


def test_flash_attention_1_has_the_traffic_of_algorithm_1():
    """N = 5, B_c = 4, B_r = 3: K and V are read once; each of two key tiles reads Q, O, l, m and writes O, l, m."""
    traffic = solve(Problem(), "flash_1").traffic
    assert traffic.read == 2 * 15 + 2 * (15 + 15 + 5 + 5)
    assert traffic.written == 2 * (15 + 5 + 5)


def test_traffic_falls_with_memory_as_in_the_theorem_and_that_of_standard_attention_does_not():
    N, d = 32, 4
    curves = count_traffic(N, d)
    standard, flash = curves.moved["standard"], curves.moved["flash_1"]
    # Forward: Q, K, V, O once, S and P twice. Backward: Q, K, V, dQ, dK, dV once, dO and P twice, dS three times.
    assert set(standard) == {(4 + 8) * N * d + (4 + 5) * N**2}
    assert curves.theorem["standard"] == pytest.approx(standard, rel=0.05)
    assert all(0.45 <= after / before <= 0.75 for before, after in itertools.pairwise(flash[:4]))
    assert all(a <= b for a, b in zip(curves.moved["flash_2"], flash, strict=True))
