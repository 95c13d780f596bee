"""The Triton kernels: in the interpreter where there is no GPU, at small sizes; tests/gpu/ has the full grid."""

import math
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attention import AttentionShape, Layout, Score, UnsupportedAttention, gpu
from attention.flash import call as calls
from attention.flash import op, tiles
from attention.flash.call import Problem
from attention.spec import Spec
from tests.attention.operators import assert_operators_keep_torchs_rules
from tests.attention.reference import KEY, Case, assert_accurate, build, formula, gradients, with_part_of_the_mask
from tests.equal import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def flash(dropout: float = 0.0, **options):
    return build("flash", dropout=dropout, **options)


@pytest.mark.parametrize("shift", [-120.0, 300.0])
def test_large_scores_cost_dq_no_more_than_the_formula_loses(shift):
    """All scores of a row are moved by the same amount, which the sum of ds along the row must cancel in dq."""
    q, k, v, do = Case(1, 2, 2, 200, 200, 32).tensors(torch.float32, DEVICE)
    q[..., 0], k[..., 0] = math.sqrt(32), shift
    expected = gradients(formula, q.double(), k.double(), v.double(), do.double())
    plain, ours = gradients(formula, q, k, v, do), gradients(flash(), q, k, v, do)
    for name, x in expected.items():
        assert (ours[name] - x).norm() < 3 * (plain[name] - x).norm(), name


@pytest.mark.parametrize("p", [1 / 256, 0.5, 255 / 256])
def test_every_rate_is_realised_exactly(p):
    """Thresholds below and above 128 compile to different instructions."""
    assert_accurate(flash(p), Case(1, 1, 1, 64, 64, 16, dropout=p), torch.float32, DEVICE)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["pointers", "copy engine"])
@pytest.mark.parametrize("D", sorted({min(key.head_dim, 256) for table in calls.TABLES.values() for key in table}))
def test_every_table_of_blocks_drops_the_weights_of_the_mask(D, capability, monkeypatch):
    """GPUs before Hopper have no copy engine."""
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    in_fp32 = capability == (9, 0) or D <= 128  # gradients
    for dtype in (torch.bfloat16, torch.float32)[: 1 + in_fp32]:
        assert_accurate(flash(0.17), Case(1, 1, 1, 20, 70, D, dropout=0.17), dtype, DEVICE)


def test_a_part_of_heads_queries_and_keys_draws_its_part_of_the_mask():
    for got, exact in with_part_of_the_mask(flash(0.5), 16, torch.float32, DEVICE):
        assert_close(got, exact, rtol=1e-4, atol=1e-5)


def test_views_of_a_fused_projection_are_used_as_they_lie():
    B, T, H, D = 2, 70, 2, 32
    fused = torch.randn(B, T, 3 * H * D, device=DEVICE)
    q, k, v = (x.view(B, T, H, D).transpose(1, 2) for x in fused.split(H * D, dim=-1))
    assert all(tiles.addressable(x) is x for x in (q, k, v))
    out = flash()(q, k, v).out
    assert out.transpose(1, 2).is_contiguous(), "the output lies as the next projection reads it"
    assert_close(out, formula(q, k, v))


def projected(x: Tensor, n_kv_heads: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the model makes them: (B, H, T, 16) views of one projection x (B, T, H + 2 H_kv, 16)."""
    split = x.split([x.shape[2] - 2 * n_kv_heads, n_kv_heads, n_kv_heads], dim=2)
    q, k, v = (part.transpose(1, 2) for part in split)
    return q, k[:, :, :T], v[:, :, :T]


@pytest.mark.parametrize("keys", [40, 30], ids=["whole", "cut"])
def test_views_of_one_projection_get_the_gradient_of_the_formula(keys):
    x, do = (torch.randn(2, 40, n, 16, generator=torch.Generator().manual_seed(n)).to(DEVICE) for n in (8, 4))
    do = do.transpose(1, 2)
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(flash()(*projected(leaf, 2, keys)).out, leaf, do)
    (expected,) = torch.autograd.grad(formula(*projected(leaf.double(), 2, keys)), leaf, do.double())
    assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_does_not_copy_to_put_the_gradient_of_its_projection_together():
    graphs: list[torch.fx.Graph] = []
    x = torch.randn(1, 40, 4, 16, device=DEVICE, requires_grad=True)
    with torch._inductor.config.patch(post_grad_custom_post_pass=Recorder(graphs)):
        out = torch.compile(lambda x: flash()(*projected(x, 1, 40)).out)(x)
        out.backward(torch.ones_like(out))
    forward_graph, backward_graph = (str(graph) for graph in graphs)
    assert "flash_forward" in forward_graph
    assert "flash_backward" in backward_graph
    assert "aten.cat" not in backward_graph


CALLS: list[dict[str, Any]] = [
    *({"scale": scale} for scale in (None, 0.5, -0.5, 0.0)),
    *({"score": score} for score in (Score(causal=False), Score(window=3), Score(formula="2 * s"), Score(alibi=True))),
    {"layout": Layout(q_start=4)},
    {"dropout_key": KEY},
]


@pytest.mark.parametrize("learns", [False, True], ids=["", "with gradients"])
def test_a_call_computes_the_same_after_others_and_again(learns):
    """A call like an earlier one is not looked at again."""
    attend = flash(dropout=0.25)
    for D, options in product((16, 13), CALLS * 2):
        *inputs, do = Case(1, 2, 2, 8, 8, D).tensors(torch.float32, DEVICE)
        q, k, v = (x.requires_grad_(learns) for x in inputs)
        ours, anew = ([*f(q, k, v, return_lse=True, **options)] for f in (attend, flash(dropout=0.25)))
        assert_equal(ours, anew)
        alone = attend(q, k, v, **options)
        assert alone.lse is None
        if learns:
            expected, *found = (torch.autograd.grad(out, inputs, do) for out, _ in (anew, ours, alone))
            assert_equal(found, [expected] * 2)
    for wrong in (k[:, :, :, :8], k.double(), k[:, :1].expand(-1, 3, -1, -1), k[0]):
        with pytest.raises(ValueError, match="q"):
            attend(q, wrong, wrong)


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
def test_a_second_derivative_is_refused_rather_than_wrong(recomputed):
    attend = flash()
    q, k, v, do = (x.requires_grad_() for x in Case(1, 1, 1, 8, 8, 16).tensors(torch.float32, DEVICE))

    def out(q):
        return attend(q, k, v).out

    policy = partial(create_selective_checkpoint_contexts, [op.flash_forward])
    for _ in range(2):  # also of a call that is known
        found = checkpoint(out, q, use_reentrant=False, context_fn=policy) if recomputed else out(q)
        (dq,) = torch.autograd.grad(found, q, do, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dq.sum().backward()


@pytest.mark.parametrize(("saves_attention", "forwards"), [(False, 2), (True, 1)], ids=["all", "around_attention"])
def test_a_compiled_block_recomputes_attention_unless_it_is_saved(saves_attention, forwards, monkeypatch):
    """torch 2.11 saves what an autograd function saves, whatever checkpointing says."""
    attend, kernel = flash(), Mock(wraps=op.compute_forward)
    monkeypatch.setattr(op, "compute_forward", kernel)
    monkeypatch.setattr(op, "replayed", lambda function, tensors, rest, *_: function(tensors, *rest))

    def policy(_, operator, *args, **kw):
        kept = operator == op.flash_forward
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x):
        return attend(*projected(2 * x, 1, 40)).out.square()

    def checkpointed(x):
        return recomputed(block, x)

    recomputed = partial(checkpoint, use_reentrant=False)
    if saves_attention:
        recomputed = partial(recomputed, context_fn=partial(create_selective_checkpoint_contexts, policy))
    x = torch.randn(1, 40, 3, 16, device=DEVICE, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    for run in (checkpointed, torch.compile(checkpointed, backend="aot_eager", fullgraph=True)):
        kernel.reset_mock()
        (found,) = torch.autograd.grad(run(x).sum(), x)
        assert_close(found, expected)
        assert kernel.call_count == forwards


class Recorder(CustomGraphPass):
    """Collects the graphs after the compiler has optimised them."""

    def __init__(self, graphs: list[torch.fx.Graph]) -> None:
        self.graphs = graphs

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append(graph)

    def uuid(self) -> None:
        """None, so that these graphs never come from the compiler's cache."""


def test_every_head_is_computed_where_the_last_section_is_not_full(monkeypatch):
    case = Case(1, 10, 5, 70, 70, 16)
    monkeypatch.setattr(tiles, "L2_BUDGET", 3 * 2 * 70 * 16 * 4)  # fp32 keys and values of three heads
    assert (
        tiles.head_group_size(10, tiles.head_bytes(torch.empty(1, 1, 70, 16)), shared_by=2) == 6
    )  # of the forward and dq
    assert tiles.head_group_size(5, 2 * tiles.head_bytes(torch.empty(1, 1, 70, 16))) == 1  # of dk and dv
    assert_accurate(flash(), case, torch.float32, DEVICE)


def test_a_negative_scale_does_not_overflow_fp16():
    q, k, v, _ = Case(1, 2, 1, 40, 40, 16).tensors(torch.float16, DEVICE)
    q, k = 1e4 * q, 1e-4 * k
    assert_close(flash()(q, k, v, scale=-8.0).out, formula(-32 * q.double(), k.double(), v.double()).half())


def test_the_operator_keeps_torchs_rules_where_an_input_is_copied():
    """Because it is not aligned; test_flash_score.py has the other inputs."""
    q, k, v = projected(torch.randn(1, 20, 3, 17, device=DEVICE)[..., 1:], 1, 20)
    assert assert_operators_keep_torchs_rules(flash(), q, k, v, q) == ["flash_forward", "flash_backward"]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"head_dim": 320}, r'name="flash" takes head sizes up to 256, not 320; .*name="tiled"'),
        ({"dtype": torch.float64}, r'name="flash" takes fp32, bf16 or fp16, not torch.float64; .*name="tiled"'),
        (
            {"device": torch.device("cpu")},
            r'needs a CUDA GPU and the device is cpu; .*name="tiled".*TRITON_INTERPRET=1',
        ),
    ],
)
def test_shapes_that_the_kernels_lack_are_refused_when_the_model_is_built(shape, reason, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    asked = {"head_dim": 64, "n_heads": 4, "n_kv_heads": 4, "dtype": torch.bfloat16, "device": torch.device("cuda:0")}
    with pytest.raises(UnsupportedAttention, match=reason):
        flash().check(AttentionShape(**(asked | shape)))


@pytest.mark.parametrize(("of_numpy", "refused"), [("2.3.5", False), ("2.4.0", True)])
def test_an_interpreter_that_fails_with_this_numpy_is_refused(of_numpy, refused, monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(np, "__version__", of_numpy)
    expected = pytest.raises(UnsupportedAttention, match=r"Triton 3.6.0 fails with NumPy 2.4.0; install 'numpy<2.4'")
    with expected if refused else nullcontext():
        flash().check(AttentionShape(64, 4, 4, torch.float32, torch.device("cpu")))


def test_a_gpu_before_ampere_is_refused(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(gpu, "capability", lambda device: (7, 5))
    with pytest.raises(UnsupportedAttention, match=r"compute capability 8.0 \(Ampere\) or newer and cuda:0 has 7.5"):
        flash().check(AttentionShape(64, 4, 4, torch.float16, torch.device("cuda:0")))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=str)
def test_gradients_in_fp32_are_refused_where_the_tiles_of_wide_heads_do_not_fit(capability, monkeypatch):
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    reason = 'has gradients in fp32 at head sizes up to 128 on .*, not 136; choose bf16 or fp16, or name="tiled"'

    def check(head_dim, dtype=torch.float32, training=True):
        flash().check(AttentionShape(head_dim, 4, 4, dtype, torch.device(DEVICE), training=training))

    with pytest.raises(UnsupportedAttention, match=reason):
        check(136)
    q = torch.randn(1, 1, 2, 136, device=DEVICE, requires_grad=True)
    with pytest.raises(UnsupportedAttention, match=reason):
        flash()(q, q, q)
    check(128)
    check(136, torch.bfloat16)
    check(136, training=False)


@pytest.mark.parametrize("score", [Score(), Score(window=100), Score(soft_cap=30.0)], ids=str)
def test_every_problem_finds_its_blocks(score):
    for dtype in (torch.bfloat16, torch.float32):
        for capability in ((8, 0), (9, 0), (12, 0)):
            for head_dim in range(1, 257):
                for threshold in (0, 26):
                    spec = Spec(score, scale=1.0, threshold=threshold)
                    for length in (1, 3000, 10**6):
                        kernels = calls.choose(Problem(spec, head_dim, dtype, length, length, capability))
                        if threshold:
                            assert all(b.q % 16 == 0 and b.k % 64 == 0 for b in kernels)
