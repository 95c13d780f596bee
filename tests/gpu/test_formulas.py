"""Scores by formula in the kernels of a GPU, plain and Hopper, against fp64."""

import random
from dataclasses import replace

import pytest
import torch

from attention import KernelPath, Score
from tests.attention.formulas import FORMULAS, KINDS, assert_right, draw
from tests.attention.operators import Calls, check_calls, compiled
from tests.attention.reference import KEY, assert_far_tiles_are_never_read
from tests.equal import assert_equal
from tests.gpu.graphs import captured
from tests.gpu.needs import A_HOPPER_GPU
from tests.gpu.test_flash import EACH_PATH, flash
from tests.gpu.test_hopper import EACH_FORWARD_KERNEL, take_kernels_of

IN_PARTS = "s * log(n + 1) + c[h, i] - c[h, j] + max(d[h, i] - d[h, j], -1e9)"
# One for each way in which values are stored and their gradients are summed.
CHOSEN = [
    "s * log(n + 1)",
    "s - slope[h] * (i - j)",
    "s + c[h, i] - c[h, j]",
    "s + bias[h, min(abs(i - j), 31)]",
    "s + pair[h, i, j]",
    "s + g[h, j] * tanh(s) + row[h, i]",
    "s + grid[max(i // 7 - j // 7, -40) + 40, h]",
    "s * sqrt(i + 1) - log(i - j + 1) * d[h]",
]
EACH_CHOSEN = pytest.mark.parametrize("number", range(len(CHOSEN)))


@EACH_PATH
@EACH_CHOSEN
def test_a_formula_is_as_accurate_as_its_dtype_with_all_gradients(number, path):
    """Two layouts a formula; a quarter of them drop weights."""
    text, rng = CHOSEN[number], random.Random(number)
    for n in (0, 3):
        kind = KINDS[(number + n) % len(KINDS)]
        problem = draw(rng, text, kind, head_dim=(64, 128)[number % 2])
        assert_right(problem, flash(problem.dropout, path), torch.bfloat16, device="cuda")


@EACH_PATH
@pytest.mark.parametrize(
    ("kind", "head_dim"), [("square", 64), ("more keys", 128), ("offset", 64), ("documents", 128), ("window", 64)]
)
@pytest.mark.parametrize("text", ["s + bias[h, min(abs(i - j), 31)]", "s + pair[h, i, j]", "s - slope[h] * (i - j)"])
def test_tiles_far_from_the_diagonal_are_as_accurate(text, kind, head_dim, path):
    problem = draw(random.Random(head_dim), text, kind, head_dim=head_dim, length=1100)
    assert_right(problem, flash(problem.dropout, path), torch.bfloat16, device="cuda")


@A_HOPPER_GPU
@EACH_CHOSEN
def test_the_forward_of_wide_heads_is_as_accurate(number):
    """The Hopper kernels have no gradients of formulas there; `auto` takes those of the plain ones."""
    rng, D = random.Random(number), (136, 192, 256)[number % 3]
    for kind, length in ((KINDS[number % len(KINDS)], 130), (KINDS[(number + 3) % len(KINDS)], 200)):
        problem = draw(rng, CHOSEN[number], kind, head_dim=D, length=length)
        assert_right(problem, flash(problem.dropout, KernelPath.hopper), torch.bfloat16, backward=False, device="cuda")
    assert_right(problem, flash(problem.dropout, KernelPath.auto), torch.bfloat16, device="cuda")


@A_HOPPER_GPU
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("square", torch.bfloat16), ("documents", torch.float16), ("window", torch.bfloat16), ("full", torch.float16)],
)
@EACH_FORWARD_KERNEL
def test_values_that_grow_from_tile_to_tile(D, length, kind, dtype, monkeypatch):
    """The walk over keys begins at the last. With the maximum so far, weights of the next tile overflow."""
    problem = draw(random.Random(D + length), "s + c[h, i] - c[h, j]", kind, head_dim=D, length=500)
    c = problem.tensors["c"]
    problem = replace(problem, tensors={"c": c + 0.5 * torch.arange(c.shape[-1])})
    take_kernels_of(length, monkeypatch)
    assert_right(problem, flash(problem.dropout, KernelPath.hopper), dtype, device="cuda")


@pytest.mark.parametrize("text", ["s + c[h, i] - c[h, j]", "s + bias[h, min(abs(i - j), 31)]"])
def test_fp32_is_as_accurate_as_fp32(text):
    problem = draw(random.Random(1), text, "documents", head_dim=64)
    assert_right(problem, flash(problem.dropout), torch.float32, device="cuda")


def drawn(text, seed):
    """q, k and v, the formula's tensors, and the gradient of out."""
    torch.manual_seed(seed)
    B, H, T, D = 2, 4, 2000, 64
    q, k, v, do = torch.randn(4, B, H, T, D, device="cuda", dtype=torch.bfloat16)
    return [*(x.requires_grad_() for x in (q, k, v, *(x.cuda() for x in FORMULAS[text](B, H, T).values()))), do]


def run(text, path, inputs, key):
    """out and all gradients."""
    (*leaves, do), score = inputs, Score(formula=text)
    tensors = dict(zip(score.tensors(), leaves[3:], strict=True))
    out = flash(0.1, path)(*leaves[:3], score=score, dropout_key=key, tensors=tensors).out
    return [out, *torch.autograd.grad(out, leaves, do)]


@EACH_PATH
@pytest.mark.parametrize(
    "text", ["s + c[h, i] - c[h, j]", "s + bias[h, min(abs(i - j), 31)]", "s + pair[h, i, j]", "s - slope[h] * (i - j)"]
)
def test_gradients_are_the_same_bits_in_every_repeat(text, path):
    *leaves, do = drawn(text, 0)
    first = run(text, path, [*leaves, do], KEY)
    for _ in range(7):
        others = [x.detach().clone().requires_grad_() for x in leaves]
        assert_equal(run(text, path, [*others, do], KEY), first)


@EACH_PATH
def test_a_compiled_call_gives_the_same(path):
    problem = replace(draw(random.Random(3), "s + c[h, i] - c[h, j]", "square", head_dim=64), dropout=0.0)
    attend = flash(path=path)
    compiled = torch.compile(attend, fullgraph=True)
    want, got = (problem.computed(run, torch.bfloat16, device="cuda") for run in (attend, compiled))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@EACH_PATH
@pytest.mark.parametrize("text", ["s + c[h, i] - c[h, j]", "s + bias[h, min(abs(i - j), 31)]"])
def test_a_cuda_graph_replays_a_formula_with_new_values(text, path):
    held, key = drawn(text, 0), KEY.pack(torch.device("cuda"))
    graph, results = captured(lambda: run(text, path, held, key))
    for seed in (1, 2):
        fresh = drawn(text, seed)
        with torch.no_grad():
            for x, new in zip(held, fresh, strict=True):
                x.copy_(new)
        graph.replay()
        assert_equal([x.clone() for x in results], run(text, path, fresh, key))


@EACH_PATH
def test_the_operators_of_a_formula_with_tensors_keep_torchs_rules(path):
    problem = replace(draw(random.Random(3), "s + c[h, i] - c[h, j]", "square", head_dim=64), dropout=0.0)
    calls = Calls()
    problem.computed(compiled(flash(path=path), calls), torch.bfloat16, device="cuda")
    assert len(calls) == 2
    check_calls(calls)


@EACH_PATH
@pytest.mark.parametrize(("T", "window", "dropout"), [(2500, None, 0.0), (2500, 1800, 0.1), (1000, None, 0.0)])
@pytest.mark.parametrize(
    ("text", "D"),
    [("s * log(n + 1) + c[h, i] - c[h, j]", 64), ("s * log(n + 1) + c[h, i] - c[h, j]", 128), (IN_PARTS, 64)],
    ids=["whole", "whole_wide", "in_parts"],
)
def test_keys_that_gates_forget_add_nothing_and_their_tiles_are_never_read(text, D, path, T, window, dropout, horizons):
    """Of four heads, two forget a key within 300 tokens; the values of the last also rise."""
    torch.manual_seed(0)
    B, H, S = 2, 4, 2500
    q, do = torch.randn(2, B, H, T, D, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, B, H, S, D, device="cuda", dtype=torch.bfloat16)
    rates = torch.tensor([4.0, 1.5, 0.001, 0.0], device="cuda")[:, None]
    c = -(rates * (0.5 + torch.rand(B, H, S, device="cuda"))).cumsum(-1)
    c[:, 3] = 400 * torch.sin(torch.arange(S, device="cuda") / 300)
    steps = (c / 16).round() * 16 if text == IN_PARTS else torch.zeros_like(c)
    attend, score = flash(dropout, path), Score(formula=text, window=window)

    def run(drawn):
        *inputs, do = drawn
        leaves = [x.clone().requires_grad_() for x in (*inputs, c - steps)]
        tensors = {"c": leaves[3]} | ({"d": steps} if text == IN_PARTS else {})
        out = attend(*leaves[:3], score=score, dropout_key=KEY, tensors=tensors).out
        return dict(zip(("out", "dq", "dk", "dv", "dc"), (out, *torch.autograd.grad(out, leaves, do)), strict=True))

    got = run((q, k, v, do))
    if T == S and window is None:
        assert_far_tiles_are_never_read(run, (q, k, v, do), 128, (True, True, False, False))
    horizons(False)
    assert_equal(run((q, k, v, do)), got)
