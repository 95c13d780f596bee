"""The properties of tiled: one tile of scores at a time, the same result for every tile size, linear memory."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import attention.tiled
from attention import Ablation, Score, UnsupportedAttention
from attention.dropout import drop_threshold
from attention.spec import Inputs, Spec
from tests.attention.contract import SCORE_CASES
from tests.attention.reference import KEY, Case, build, flops_of_tiles, formula, gradients, results_of
from tests.equal import assert_equal


def tiled(block_q: int = 16, block_k: int = 16, **options):
    return build("tiled", block_q=block_q, block_k=block_k, **options)


class LargestTensor(TorchDispatchMode):
    """Watches every operation and keeps the size of the largest tensor that one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@pytest.mark.parametrize("blocks", [(64, 16), (7, 33), (1000, 1000)], ids=str)
@pytest.mark.parametrize(
    "case",
    [Case(2, 4, 2, 40, 71, 12), Case(2, 4, 2, 71, 40, 12), SCORE_CASES["everything"]],
    ids=["more_keys", "more_queries", "everything"],
)
def test_result_is_independent_of_tile_size_with_dropout_on(case, blocks):
    tensors, attentions = case.tensors(torch.float64), (tiled(*blocks, dropout=0.2), build("naive", dropout=0.2))
    assert_close(*(results_of(attend, case, tensors) for attend in attentions), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "case",
    [
        *(
            Case(1, 1, 1, T, S, 4, causal=causal)
            for T, S in ((64, 64), (32, 64), (64, 32), (50, 79), (79, 50))
            for causal in (True, False)
        ),
        Case(1, 1, 1, 160, 160, 4, window=40),
        Case(1, 1, 1, 96, 160, 4, window=33),
        Case(1, 1, 1, 160, 160, 4, documents=(16, 70, 74)),
        Case(1, 1, 1, 160, 160, 4, causal=False, documents=(16, 70, 74)),
        Case(1, 1, 1, 160, 160, 4, window=20, documents=(100, 60)),
    ],
    ids=lambda c: f"{c.T}-{c.S}-{c.window}-{c.documents}-{c.causal}",
)
def test_tiles_without_visible_keys_are_never_visited_and_others_once_in_each_pass(case):
    layout = case.layout()
    with FlopCounterMode(display=False) as flops:
        gradients(lambda q, k, v: tiled(16, 32)(q, k, v, score=case.score, layout=layout), *case.tensors(torch.float32))
    assert flops.get_total_flops() == flops_of_tiles(case, 16, 32)


def test_only_inputs_output_and_log_sum_exp_are_saved_for_the_backward():
    q, k, v, _ = (x.requires_grad_() for x in Case(2, 4, 2, 300, 300, 8).tensors(torch.float32))
    kept: list[torch.Tensor] = []

    def keep(x):
        kept.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        out, lse = tiled(dropout=0.1)(q, k, v, dropout_key=KEY, return_lse=True)
    expected = {"q": q.shape, "k": k.shape, "v": v.shape, "out": out.shape, "lse": lse.shape, "key": (7,)}
    assert sorted(tuple(x.shape) for x in kept) == sorted(tuple(shape) for shape in expected.values())


def test_nothing_of_the_size_of_the_scores_is_ever_allocated():
    q, k, v, dout = Case(1, 2, 2, 192, 192, 16).tensors(torch.float32)
    with LargestTensor() as largest:
        gradients(lambda q, k, v: tiled(32, 32, dropout=0.1)(q, k, v, dropout_key=KEY), q, k, v, dout)
    assert largest.elements == q.numel()
    with LargestTensor() as largest:
        gradients(build("naive"), q, k, v, dout)
    assert largest.elements == 2 * 192 * 192


def test_gradients_keep_their_precision_in_a_backward_pass_under_autocast():
    tensors = Case(1, 2, 1, 40, 40, 16).tensors(torch.float32)
    expected = gradients(tiled(), *tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(gradients(tiled(), *tensors), expected)


def test_custom_operations_are_described_truthfully():
    q, k, v, dout = Case(1, 4, 2, 20, 30, 8).tensors(torch.bfloat16)
    spec = Spec(Score(), scale=0.3, threshold=drop_threshold(0.25), block_q=16, block_k=16)
    inputs = Inputs(KEY.pack(torch.device("cpu")))
    torch.library.opcheck(attention.tiled.forward_op, (q, k, v, inputs.present(), spec.text(), None, 0))
    out, lse = attention.tiled.forward(q, k, v, inputs, spec, None, 0)
    torch.library.opcheck(
        attention.tiled.backward_op, (dout, [q, k, v, out, lse, *inputs.present()], spec.text(), None, 0)
    )


def test_a_second_derivative_is_refused_rather_than_wrong():
    q, k, v, dout = (x.requires_grad_() for x in Case(1, 1, 1, 8, 8, 4).tensors(torch.float32))
    (dq,) = torch.autograd.grad(tiled()(q, k, v).out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_without_max_subtraction_the_first_large_score_overflows():
    q, k, v, _ = Case(1, 1, 1, 64, 64, 16, spread=4.0).tensors(torch.float32)
    ablated = tiled(ablate=Ablation.no_max_subtraction)
    assert_close(ablated(q, k, v).out, formula(q, k, v))  # harmless where exp holds the scores
    q[0, 0, 40] *= 100
    out = ablated(q, k, v).out
    assert not out[0, 0, 40].isfinite().any()
    assert out[0, 0, :40].isfinite().all()
    assert tiled()(q, k, v).out.isfinite().all()


def test_without_rescaling_rows_are_finite_and_wrong_from_the_second_tile_on():
    q, k, v, _ = Case(1, 1, 1, 64, 64, 16, spread=4.0).tensors(torch.float32)
    out, exact = tiled(ablate=Ablation.no_rescaling)(q, k, v).out, formula(q, k, v)
    assert out.isfinite().all()
    assert_close(out[:, :, :16], exact[:, :, :16])  # one tile: there is nothing to rescale
    assert (out - exact)[:, :, 16:].abs().max() > 0.1


def test_tiles_have_at_least_one_row_and_column():
    for blocks, message in {(0, 16): "block_q=0", (16, -1): "block_k=-1"}.items():
        with pytest.raises(UnsupportedAttention, match=f"{message} must be at least 1"):
            tiled(*blocks)


@pytest.mark.parametrize("score", [Score(), Score(sinks=True), Score(alibi=True, sinks=True)])
def test_a_compiled_call_without_gradients_takes_any_number_of_tensors(score):
    torch.compiler.reset()  # other tests of this process have compiled the call as often as the compiler allows
    q, k, v, _ = Case(1, 2, 2, 9, 9, 4).tensors(torch.float32)
    attend, sinks = tiled(), torch.tensor([0.5, -1.0]) if score.sinks else None
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, score=score, sinks=sinks).out, attend(q, k, v, score=score, sinks=sinks).out)
