"""attention.precision=fp8: its error compared with fp64 of the same quantised inputs, and the calls that it refuses."""

import pytest
import torch

from attention import ProductPrecision, Score, UnsupportedAttention
from attention.flash.call import Problem
from attention.flash.paths import choose_path, describe_path
from attention.spec import Spec
from tests.attention.reference import Case, build, formula
from tests.attention.test_flash import DEVICE
from tests.attention.test_hopper import shape

SPEC = Spec(Score(), scale=1.0, precision="fp8")
PROBLEM = Problem(SPEC, 128, torch.bfloat16, queries=4096, keys=4096, capability=(9, 0))
E4M3 = 2.0**-4  # half of the last place


def fp8(**options):
    return build("flash", precision=ProductPrecision.fp8, **options)


def quantised(x: torch.Tensor) -> torch.Tensor:
    """x as e4m3 with one scale a head gives it back, in fp64."""
    scale = x.double().abs().amax((2, 3), keepdim=True) / 448
    return (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(1, 2, 1, 130, 130, 64), torch.bfloat16),
        (Case(2, 2, 2, 40, 150, 40, causal=False), torch.float32),
        (Case(1, 4, 2, 150, 40, 16), torch.bfloat16),
        (Case(1, 1, 1, 70, 70, 136, causal=False), torch.bfloat16),
        (Case(1, 1, 1, 70, 70, 64, spread=30.0), torch.float32),
    ],
)
def test_error_beyond_that_of_the_inputs_is_one_rounding_of_the_weights(case, dtype):
    q, k, v, _ = case.tensors(dtype, DEVICE)
    v = v * torch.arange(1, case.H_kv + 1, device=DEVICE, dtype=dtype)[:, None, None]  # scales differ from head to head
    out, lse = fp8()(q, k, v, score=Score(causal=case.causal), return_lse=True)
    q8, k8, v8 = (quantised(x) for x in (q, k, v))
    expected = formula(q8, k8, v8, causal=case.causal)
    # The weights are rounded, of the smallest all digits; and out.
    allowed = E4M3 * formula(q8, k8, v8.abs(), causal=case.causal) + 2.0**-12 * v8.abs().amax()
    allowed += torch.finfo(dtype).eps * expected.abs()
    assert ((out.double() - expected).abs() <= allowed).all()
    scores = q8 @ k8.repeat_interleave(case.H // case.H_kv, 1).mT / case.D**0.5
    if case.causal:
        scores = scores.masked_fill(~case.visible()[:, None].to(DEVICE), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"capability": (8, 6)}, r"needs a GPU of compute capability 8.9 \(Ada\) or newer"),
        ({"spec": SPEC._replace(path="hopper")}, "has no kernels for Hopper of its own"),
        ({"spec": SPEC._replace(score=Score(window=9, sinks=True))}, "does not support sinks, window;"),
        ({"spec": SPEC._replace(score=Score(causal=False), threshold=9)}, "does not support dropout;"),
    ],
    ids=["Ampere", "hopper", "score", "dropout"],
)
def test_calls_that_fp8_lacks_are_refused_by_name(other, reason, hopper_gpu):
    for path in ("auto", "plain"):
        assert describe_path(PROBLEM._replace(spec=SPEC._replace(path=path))) == "fp8"
    with pytest.raises(UnsupportedAttention, match=rf'^precision="fp8" {reason}.*precision="inputs"'):
        choose_path(PROBLEM._replace(**other), backward=False)


def test_training_is_refused_and_evaluation_of_a_model_with_dropout_is_not(hopper_gpu):
    attend = fp8(dropout=0.1)
    attend.check(shape())
    assert attend.path(shape(), 4096) == "fp8"
    with pytest.raises(UnsupportedAttention, match=r'is for evaluation and inference.*precision="inputs"'):
        attend.check(shape(training=True))


def test_gradients_are_refused_in_the_forward():
    q, k, v = torch.randn(3, 1, 2, 16, 64, dtype=torch.bfloat16)
    for x in (q, k, v):
        with pytest.raises(UnsupportedAttention, match="has no gradients"):
            fp8()(*(y.clone().requires_grad_(y is x) for y in (q, k, v)))
